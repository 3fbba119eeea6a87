//! A secured HDFS and a KDC of Debian's packages, on their own ports, without root or namespaces.
//!
//! The worker is a process, because Kerberos is configured by environment variables.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard};
use uniffle_client::block::IdLayout;
use uniffle_client::grpc::{ShuffleClient, register_request};
use uniffle_client::send::SendForm;
use uniffle_testkit::block_generator::BlockGenerator;
use uniffle_wire::types::{AppId, PartitionId, ShuffleId, ShuffleKey, TaskAttemptId};
use uniffle_worker::proto::{RemoteStorage, RemoteStorageConfItem, ShuffleRegisterRequest};

use uniffle_testkit::hdfs::{FileStatus, MiniHdfs};
use uniffle_testkit::ports::free_port;
use uniffle_testkit::tools::{available, find};
use uniffle_testkit::wait_until;
use uniffle_testkit::worker::{Setup, WorkerProcess};

const REALM: &str = "UNIFFLE.TEST";
const WORKER: &str = "uniffle/localhost@UNIFFLE.TEST";
const WRITE_DEADLINE: Duration = Duration::from_secs(60);

/// A KDC and an HDFS that trusts it.
struct Secured {
    hdfs: MiniHdfs,
    kdc: Arc<Kdc>,
}

static SECURED: LazyLock<Mutex<Option<Secured>>> = LazyLock::new(|| Mutex::new(None));

struct Kdc {
    dir: tempfile::TempDir,
    child: Child,
}

impl Drop for Kdc {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn is_available() -> bool {
    available("Kerberos", &["java", "mvn", "krb5kdc", "kdb5_util", "kadmin.local", "kinit"])
}

impl Kdc {
    fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("uniffle-kdc-").tempdir().unwrap();
        let port = free_port();
        let home = dir.path().display();
        std::fs::write(
            dir.path().join("krb5.conf"),
            format!(
                "[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n dns_lookup_realm = false\n \
                 dns_canonicalize_hostname = false\n rdns = false\n udp_preference_limit = 1\n\
                 [realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n"
            ),
        )
        .unwrap();
        std::fs::write(
            dir.path().join("kdc.conf"),
            format!(
                "[kdcdefaults]\n kdc_listen = 127.0.0.1:{port}\n kdc_tcp_listen = 127.0.0.1:{port}\n\
                 [realms]\n {REALM} = {{\n  database_name = {home}/principal\n  key_stash_file = {home}/stash\n  \
                 acl_file = {home}/acl\n  max_life = 1h\n }}\n\
                 [logging]\n kdc = FILE:{home}/kdc.log\n default = FILE:{home}/kdc.log\n"
            ),
        )
        .unwrap();
        let with = |name: &str| {
            let mut command = Command::new(find(name).unwrap());
            command
                .env("KRB5_CONFIG", dir.path().join("krb5.conf"))
                .env("KRB5_KDC_PROFILE", dir.path().join("kdc.conf"))
                .stdin(Stdio::null());
            command
        };
        succeed(with("kdb5_util").args(["create", "-s", "-r", REALM, "-P", "secret"]));
        for (name, life) in [("hdfs", "1h"), ("uniffle", "1h"), ("other", "1h"), ("short", "5s")] {
            let add = format!("addprinc -randkey -maxlife {life} {name}/localhost");
            succeed(with("kadmin.local").args(["-q", &add]));
            let path = dir.path().join(format!("{name}.keytab"));
            let export = format!("ktadd -k {} {name}/localhost", path.display());
            succeed(with("kadmin.local").args(["-q", &export]));
        }
        let log = std::fs::File::create(dir.path().join("stderr.log")).unwrap();
        let child = with("krb5kdc").arg("-n").stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let kdc = Self { dir, child };
        wait_until("the KDC answers", Duration::from_secs(20), || {
            kdc.kinit("ready", "uniffle", "1h").map_err(|error| format!("{error}; {}", kdc.log()))
        });
        kdc
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log(&self) -> String {
        ["stderr.log", "kdc.log"]
            .map(|name| std::fs::read_to_string(self.path(name)).unwrap_or_default())
            .concat()
    }

    /// Obtains a ticket with the lifetime `life` and stores it in a cache, as an administrator
    /// would.
    fn kinit(&self, cache: &str, name: &str, life: &str) -> Result<PathBuf, String> {
        let path = self.path(cache);
        let output = Command::new(find("kinit").unwrap())
            .env("KRB5_CONFIG", self.path("krb5.conf"))
            .args(["-l", life, "-k", "-t"])
            .arg(self.path(&format!("{name}.keytab")))
            .arg("-c")
            .arg(format!("FILE:{}", path.display()))
            .arg(format!("{name}/localhost@{REALM}"))
            .output()
            .unwrap();
        match output.status.success() {
            true => Ok(path),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }
}

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Waits for exclusive use of the KDC and the HDFS, which are started on first use. Returns `None`
/// if a tool is missing.
async fn secured() -> Option<MutexGuard<'static, Option<Secured>>> {
    if !is_available() {
        return None;
    }
    let mut place = SECURED.lock().await;
    if place.is_none() {
        let kdc = Arc::new(Kdc::start());
        let keytab = kdc.path("hdfs.keytab").display().to_string();
        let mut java = Command::new("java");
        java.arg(format!("-Djava.security.krb5.conf={}", kdc.path("krb5.conf").display()));
        java.env("KRB5_CONFIG", kdc.path("krb5.conf"));
        let principal = format!("hdfs/localhost@{REALM}");
        let settings = [
            "hadoop.security.authentication=kerberos".to_owned(),
            "hadoop.security.authorization=true".to_owned(),
            "hadoop.rpc.protection=authentication".to_owned(),
            "dfs.data.transfer.protection=authentication".to_owned(),
            "dfs.block.access.token.enable=true".to_owned(),
            "ignore.secure.ports.for.testing=true".to_owned(),
            "hadoop.proxyuser.uniffle.hosts=*".to_owned(),
            "hadoop.proxyuser.uniffle.groups=*".to_owned(),
            "hadoop.proxyuser.uniffle.users=*".to_owned(),
            format!("dfs.namenode.keytab.file={keytab}"),
            format!("dfs.namenode.kerberos.principal={principal}"),
            format!("dfs.datanode.keytab.file={keytab}"),
            format!("dfs.datanode.kerberos.principal={principal}"),
        ];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let hdfs = MiniHdfs::start_with(java, &settings);
        hdfs.run("mkdirs /uniffle");
        hdfs.run("chmod 777 /uniffle");
        *place = Some(Secured { hdfs, kdc });
    }
    Some(place)
}

impl Secured {
    /// Returns the settings of a worker that flushes partitions of 1 MiB.
    fn setup(&self, name: &'static str, kerberos: &str, cache: Option<&Path>) -> Setup {
        let mut env = vec![
            ("KRB5_CONFIG", self.kdc.path("krb5.conf").display().to_string()),
            ("HADOOP_CONF_DIR", self.conf_dir()),
        ];
        env.extend(cache.map(|path| ("KRB5CCNAME", format!("FILE:{}", path.display()))));
        Setup {
            name,
            capacity: "32MiB",
            disks: 0,
            store_type: "MEMORY_HDFS",
            made_tables: format!(
                "[hdfs_store]\nallowed_paths = [\"{}\"]\n{kerberos}\n[hybrid_store]\n\
                 memory_single_buffer_max_spill_size = \"1MiB\"",
                self.hdfs.url("/uniffle")
            ),
            env,
            ..Setup::default()
        }
    }

    /// Returns the directory of the cluster's Hadoop configuration.
    fn conf_dir(&self) -> String {
        let dir = self.kdc.path("hadoop");
        std::fs::create_dir_all(&dir).unwrap();
        let property = |(name, value): &(&str, &str)| {
            format!("<property><name>{name}</name><value>{value}</value></property>")
        };
        let properties = [
            ("hadoop.security.authentication", "kerberos"),
            ("dfs.data.transfer.protection", "authentication"),
        ];
        let text: String = properties.iter().map(property).collect();
        std::fs::write(dir.join("core-site.xml"), format!("<configuration>{text}</configuration>")).unwrap();
        dir.display().to_string()
    }

    fn keytab(&self, name: &str) -> String {
        let path = self.kdc.path(&format!("{name}.keytab"));
        let principal = format!("{name}/localhost@{REALM}");
        format!("[hdfs_store.kerberos_security_config]\nkeytab_path = {path:?}\nprincipal = \"{principal}\"")
    }

    /// Sends 2.4 MB for `user`, waits until data and index files have content, and unregisters the
    /// application. Returns the files as they were before their deletion.
    async fn write_as(&self, worker: &WorkerProcess, user: &str) -> Vec<FileStatus> {
        let address = ([127, 0, 0, 1], worker.ready().grpc_port).into();
        let client = ShuffleClient::connect(address).await.unwrap();
        let app = format!("app-{user}");
        let key = ShuffleKey::new(AppId::parse(&app).unwrap(), ShuffleId(1));
        client.register_with(self.registration(&key, user)).await.unwrap();
        let generator = BlockGenerator::new(5, IdLayout::SPARK);
        let partition = PartitionId(0);
        let blocks: Vec<_> =
            (0..4).map(|n| generator.block(partition, TaskAttemptId(1), n, 600_000)).collect();
        client.push(&key, SendForm::Classic, &[(partition, blocks)]).await.unwrap();
        let directory = format!("/uniffle/{app}");
        let files = wait_until("the blocks are in HDFS", WRITE_DEADLINE, || {
            let files = self.hdfs.list(&directory);
            let has = |ending: &str| files.iter().any(|file| file.path.ends_with(ending) && file.bytes > 0);
            if has(".data") && has(".index") {
                Ok(files)
            } else {
                Err(format!("{files:?}; {}", worker.log()))
            }
        });
        client.unregister_app(&app).await.unwrap();
        wait_until("the application's files are gone", WRITE_DEADLINE, || match self.hdfs.list(&directory) {
            remaining if remaining.is_empty() => Ok(()),
            remaining => Err(format!("{remaining:?}")),
        });
        files
    }

    fn registration(&self, key: &ShuffleKey, user: &str) -> ShuffleRegisterRequest {
        let mut request = register_request(key, &[(0, 0)]);
        user.clone_into(&mut request.user);
        // A client with settings of its own, irrelevant here.
        let item =
            |key: &str, value: &str| RemoteStorageConfItem { key: key.to_owned(), value: value.to_owned() };
        let remote_storage_conf =
            vec![item("dfs.client.use.datanode.hostname", "false"), item("yarn.x", "y")];
        request.remote_storage = Some(RemoteStorage { path: self.hdfs.url("/uniffle"), remote_storage_conf });
        request
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keytab_login_writes_as_the_apps_user() {
    let Some(place) = secured().await else { return };
    let secured = place.as_ref().unwrap();
    let precheck = format!("precheck_enable = true\n{}", secured.keytab("uniffle"));
    let worker = WorkerProcess::start(&secured.setup("keytab", &precheck, None));
    for user in ["alice", "bob"] {
        let files = secured.write_as(&worker, user).await;
        assert!(files.iter().all(|file| file.owner == user), "{files:?}");
    }
    worker.assert_no_error_logged();
    worker.stop();

    let own = format!("{}\nproxy_user_enable = false", secured.keytab("uniffle"));
    let worker = WorkerProcess::start(&secured.setup("keytab-own", &own, None));
    let files = secured.write_as(&worker, "alice").await;
    assert!(files.iter().all(|file| file.owner == "uniffle"), "{files:?}");
    worker.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keytab_login_renews_expired_tickets() {
    let Some(place) = secured().await else { return };
    let secured = place.as_ref().unwrap();
    let own = format!("{}\nproxy_user_enable = false", secured.keytab("short"));
    let worker = WorkerProcess::start(&secured.setup("renewal", &own, None));
    let files = secured.write_as(&worker, "alice").await;
    assert!(files.iter().all(|file| file.owner == "short"), "{files:?}");
    // A ticket obtained after the worker's has the later expiry.
    let expires = secured.kdc.kinit("short", "short", "1h").unwrap();
    wait_until("the ticket expires", Duration::from_secs(30), || {
        WorkerProcess::refused(&secured.setup("short", "", Some(&expires)))
    });
    // Breaks all connections. New ones need a valid ticket.
    secured.hdfs.run("stop-namenode");
    secured.hdfs.run("start-namenode");
    secured.write_as(&worker, "alice").await;
    worker.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ticket_cache_login_writes_as_the_apps_user() {
    let Some(place) = secured().await else { return };
    let secured = place.as_ref().unwrap();
    let cache = secured.kdc.kinit("good", "uniffle", "1h").unwrap();
    let worker = WorkerProcess::start(&secured.setup("cache", "", Some(&cache)));
    let files = secured.write_as(&worker, "carol").await;
    assert!(files.iter().all(|file| file.owner == "carol"), "{files:?}");
    let files = secured.write_as(&worker, "uniffle").await;
    assert!(files.iter().all(|file| file.owner == "uniffle"), "{files:?}");
    worker.stop();
}

/// Blocks that cannot be written stay in memory; the job only takes longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flush_waits_for_renewal_of_expired_ticket_cache() {
    let Some(place) = secured().await else { return };
    let secured = place.as_ref().unwrap();
    let kinit = |life| secured.kdc.kinit("brief", "uniffle", life).unwrap();
    let cache = kinit("10s");
    let worker = WorkerProcess::start(&secured.setup("cache-expires", "", Some(&cache)));
    wait_until("the ticket expires", Duration::from_secs(30), || {
        WorkerProcess::refused(&secured.setup("cache-expired", "", Some(&cache)))
    });
    let renew_after_a_failure = || {
        wait_until("nothing can be written", WRITE_DEADLINE, || {
            match worker.metrics().total("total_memory_to_hdfs_spill_failed") {
                Some(failed) if failed > 0.0 => Ok(()),
                other => Err(format!("{other:?} failures; {}", worker.log())),
            }
        });
        kinit("1h");
    };
    tokio::task::block_in_place(|| {
        std::thread::scope(|scope| {
            scope.spawn(renew_after_a_failure);
            tokio::runtime::Handle::current().block_on(secured.write_as(&worker, "uniffle"));
        });
    });
    worker.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_without_login_fails_with_a_reason() {
    let Some(place) = secured().await else { return };
    let secured = place.as_ref().unwrap();
    let expired = secured.kdc.kinit("expired", "uniffle", "1s").unwrap();
    let refusal = wait_until("the ticket expires", Duration::from_secs(30), || {
        WorkerProcess::refused(&secured.setup("expired", "", Some(&expired)))
    });
    for part in ["KRB5CCNAME", "expired", WORKER, "keytab_path"] {
        assert!(refusal.contains(part), "{part} is missing: {refusal}");
    }
    let absent = secured.setup("no-cache", "", Some(Path::new("/nonexistent/cache")));
    let refusal = WorkerProcess::refused(&absent).unwrap();
    assert!(refusal.contains("/nonexistent/cache"), "{refusal}");

    let other = secured.keytab("uniffle").replace("uniffle.keytab", "other.keytab");
    let refusal = WorkerProcess::refused(&secured.setup("other-keytab", &other, None)).unwrap();
    assert!(refusal.contains("has no key of uniffle/localhost"), "{refusal}");
    let absent = secured.keytab("uniffle").replace("uniffle.keytab", "absent.keytab");
    let refusal = WorkerProcess::refused(&secured.setup("no-keytab", &absent, None)).unwrap();
    assert!(refusal.contains("keytab_path") && refusal.contains("absent.keytab"), "{refusal}");
}
