//! TLS on the listeners, with certificates created by the test.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::Endpoint;
use uniffle_client::grpc::ShuffleClient;
use uniffle_client::types::{PartitionId, ShuffleId, TaskAttemptId};
use uniffle_client::{ClientOptions, Cluster, TaskFilter, TlsOptions};
use uniffle_worker::proto::AppHeartBeatRequest;
use uniffle_worker::proto::shuffle_server_client::ShuffleServerClient;
use uniffle_worker::server::Worker;

use super::fixture::{AdminFixture, config_text, parse, start_from};
use uniffle_testkit::worker::{self, Setup};

const WAIT_MAX: Duration = Duration::from_secs(20);

/// A certificate authority, a server certificate and a client certificate, as PEM files.
struct Certificates {
    dir: TempDir,
}

impl Certificates {
    fn make() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let write = |name: &str, text: String| std::fs::write(dir.path().join(name), text).unwrap();
        write("ca.pem", authority.pem());
        for name in ["server", "client"] {
            let key = KeyPair::generate().unwrap();
            let params =
                CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
            write(&format!("{name}.pem"), params.signed_by(&key, &authority).unwrap().pem());
            write(&format!("{name}.key"), key.serialize_pem());
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    /// Returns lines for `[tls]`.
    fn table(&self) -> String {
        let (cert, key) = (self.path("server.pem"), self.path("server.key"));
        format!("cert_file = {cert:?}\nkey_file = {key:?}\n")
    }

    fn connector(&self, client: Option<&str>, protocol: &str) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca.pem")).unwrap()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match client {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let chain = vec![CertificateDer::from_pem_file(self.path(&format!("{name}.pem"))).unwrap()];
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Arc::new(config).into()
    }
}

fn config(dir: &Path, tls: &str) -> String {
    config_text(dir, "", &format!("[tls]\n{tls}"))
}

async fn connect(connector: &TlsConnector, port: u16) -> std::io::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(("127.0.0.1", port)).await?;
    connector.connect(host(), socket).await
}

fn host() -> ServerName<'static> {
    ServerName::try_from("localhost").unwrap()
}

/// Sends a request over TLS. Returns the status line; in TLS 1.3 a refused client certificate shows
/// only here.
async fn ask(connector: &TlsConnector, port: u16, request: &str) -> std::io::Result<String> {
    let answer = whole_answer(connector, port, request).await?;
    Ok(answer.lines().next().unwrap_or_default().to_owned())
}

async fn whole_answer(connector: &TlsConnector, port: u16, request: &str) -> std::io::Result<String> {
    let mut stream = connect(connector, port).await?;
    stream.write_all(format!("{request} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn heartbeat(connector: TlsConnector, port: u16) -> Result<i32, String> {
    let socket = TcpStream::connect(("127.0.0.1", port)).await.map_err(|error| error.to_string())?;
    heartbeat_on(connector, socket).await
}

/// Sends a heartbeat. Returns the status of the response.
async fn heartbeat_on(connector: TlsConnector, socket: TcpStream) -> Result<i32, String> {
    let mut socket = Some(socket);
    let connect = tower::service_fn(move |_| {
        let handshake = socket.take().map(|socket| connector.connect(host(), socket));
        async move {
            match handshake {
                Some(handshake) => handshake.await.map(TokioIo::new),
                None => Err(std::io::ErrorKind::ConnectionAborted.into()),
            }
        }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connect).await;
    let mut client = ShuffleServerClient::new(channel.map_err(|error| format!("{error:?}"))?);
    let request = AppHeartBeatRequest { app_id: "unknown".to_owned() };
    client
        .app_heartbeat(request)
        .await
        .map(|answer| answer.into_inner().status)
        .map_err(|status| format!("{status:?}"))
}

#[tokio::test]
async fn grpc_and_http_listeners_require_tls() {
    let certificates = Certificates::make();
    let dir = tempfile::tempdir().unwrap();
    let worker = Worker::start(&parse(&config(dir.path(), &certificates.table()))).await.unwrap();
    let addresses = worker.addresses();
    let http = certificates.connector(None, "http/1.1");
    assert_eq!(ask(&http, addresses.http.port(), "GET /health/live").await.unwrap(), "HTTP/1.1 200 OK");
    let admin = addresses.admin.unwrap().port();
    assert_eq!(ask(&http, admin, "POST /admin/flush").await.unwrap(), "HTTP/1.1 200 OK");
    // NO_REGISTER: the call reached the service.
    assert_eq!(heartbeat(certificates.connector(None, "h2"), addresses.grpc.port()).await, Ok(4));
    for port in [addresses.http.port(), admin] {
        let answer = reqwest::get(format!("http://127.0.0.1:{port}/health/live")).await;
        assert!(answer.is_err(), "{answer:?}");
    }
    let channel = Endpoint::from_shared(format!("http://{}", addresses.grpc)).unwrap().connect_lazy();
    let request = AppHeartBeatRequest { app_id: "unknown".to_owned() };
    ShuffleServerClient::new(channel).app_heartbeat(request).await.unwrap_err();
    assert_eq!(worker.stop().await, 0);
}

#[tokio::test]
async fn clients_without_valid_certificate_are_refused() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let dir = tempfile::tempdir().unwrap();
    let tls = certificates.table() + &format!("client_ca_file = {:?}", certificates.path("ca.pem"));
    let worker = Worker::start(&parse(&config(dir.path(), &tls))).await.unwrap();
    let addresses = worker.addresses();
    // A certificate of another authority for the same subject.
    for name in ["client.pem", "client.key"] {
        std::fs::copy(others.path(name), certificates.path(&format!("other-{name}"))).unwrap();
    }
    let listeners = [(addresses.http, "GET /health/live"), (addresses.admin.unwrap(), "POST /admin/flush")];
    for (address, request) in listeners {
        let asked = |client| {
            let connector = certificates.connector(client, "http/1.1");
            async move { ask(&connector, address.port(), request).await }
        };
        assert_eq!(asked(Some("client")).await.unwrap(), "HTTP/1.1 200 OK", "{request}");
        for refused in [None, Some("other-client")] {
            let answer = asked(refused).await;
            assert!(answer.is_err(), "{request} with {refused:?} was accepted: {answer:?}");
        }
    }
    let beaten = |client| heartbeat(certificates.connector(client, "h2"), addresses.grpc.port());
    assert_eq!(beaten(Some("client")).await, Ok(4));
    for refused in [None, Some("other-client")] {
        assert!(beaten(refused).await.is_err(), "{refused:?}");
    }
    assert_eq!(worker.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctl_uses_tls_and_client_certificate() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let dir = tempfile::tempdir().unwrap();
    let tls = certificates.table() + &format!("client_ca_file = {:?}", certificates.path("ca.pem"));
    let worker = Worker::start(&parse(&config(dir.path(), &tls))).await.unwrap();
    let [http, admin] = [worker.addresses().http, worker.addresses().admin.unwrap()]
        .map(|address| format!("https://localhost:{}", address.port()));
    let ctl = |made: &Certificates, call: &'static str| {
        let [ca, cert, key] =
            ["ca.pem", "client.pem", "client.key"].map(|name| made.path(name).display().to_string());
        let (http, admin) = (http.clone(), admin.clone());
        async move {
            let whom = ["ctl", call, "--worker", &http, "--admin", &admin];
            let files = ["--ca-file", &ca, "--cert-file", &cert, "--key-file", &key];
            super::ctl::run(&[&whom[..], &files].concat()).await
        }
    };
    for call in ["status", "decommission"] {
        let done = ctl(&certificates, call).await;
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{call}: {}", done.stdout);
        assert_eq!(ctl(&others, call).await.code, 3, "{call}");
    }
    // The embedded coordinator uses the gRPC listener, which has TLS too.
    let address = format!("localhost:{}", worker.addresses().grpc.port());
    let (over_tls, plain) = (format!("https://{address}"), address.as_str());
    let files = |made: &Certificates| {
        ["ca.pem", "client.pem", "client.key"].map(|name| made.path(name).display().to_string())
    };
    let status = |coordinator: String, [ca, cert, key]: [String; 3]| async move {
        let files = ["--ca-file", &ca, "--cert-file", &cert, "--key-file", &key];
        super::ctl::run(&[&["ctl", "status", "--coordinator", &coordinator][..], &files].concat()).await
    };
    let listed = status(over_tls.clone(), files(&certificates)).await.succeeded();
    assert!(listed.contains("decommissioned"), "{listed}");
    let refused = status(plain.to_owned(), files(&certificates)).await;
    assert!(refused.code == 3 && refused.stderr.contains("needs https://"), "{}", refused.stderr);
    assert_eq!(status(over_tls, files(&others)).await.code, 3);
    let done = super::ctl::run(&["ctl", "status", "--worker", &http]).await;
    assert!(done.code == 3 && done.stderr.contains("https needs --ca-file"), "{}", done.stderr);
    assert_eq!(worker.stop().await, 0);
}

/// The worker requires client certificates. Its embedded coordinator uses the same listener.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_crate_writes_and_reads_with_tls() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let dir = tempfile::tempdir().unwrap();
    let tls = certificates.table() + &format!("client_ca_file = {:?}", certificates.path("ca.pem"));
    let worker = Worker::start(&parse(&config(dir.path(), &tls))).await.unwrap();
    let address = worker.addresses().grpc.to_string();
    let trusting = |made: &Certificates| TlsOptions::new(made.read("ca.pem")).unwrap();
    let with_identity =
        |tls: TlsOptions| tls.with_identity(certificates.read("client.pem"), certificates.read("client.key"));
    let cluster = |address: &str, tls: Option<TlsOptions>| {
        let options = ClientOptions::default().with(|options| {
            options.tls = tls;
            options.failures.attempts = 1;
        });
        Cluster::new([address], options).unwrap()
    };
    let accepted = with_identity(trusting(&certificates)).unwrap();
    let application = cluster(&address, Some(accepted.clone())).application("tls").await.unwrap();
    let shuffle = application.register_shuffle(ShuffleId(0), 1).await.unwrap();
    let mut writer = shuffle.writer(TaskAttemptId(0)).unwrap();
    writer.write(PartitionId(0), &b"a block"[..]).await.unwrap();
    writer.finish().await.unwrap();
    let reader = shuffle.reader(PartitionId(0), &TaskFilter::all()).await.unwrap();
    let read: Vec<_> = reader.into_stream().map(|block| block.unwrap().data).collect().await;
    assert_eq!(read, [&b"a block"[..]]);
    application.unregister().await.unwrap();

    let refused = [
        ("an unknown authority", &address, Some(with_identity(trusting(&others)).unwrap())),
        ("no client certificate", &address, Some(trusting(&certificates))),
        ("another name", &address, Some(accepted.clone().with_server_name("other.example").unwrap())),
        ("no TLS", &address, None),
        ("plaintext", &format!("http://{address}"), Some(accepted)),
    ];
    for (case, address, tls) in refused {
        let error = cluster(address, tls).application("refused").await.unwrap_err();
        assert!(matches!(error, uniffle_client::Error::Call { .. }), "{case}: {error}");
    }
    assert_eq!(worker.stop().await, 0);
}

/// The coordinator's worker first trusts another authority; a reload then picks up the right one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn app_is_explained_across_workers_with_https() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let trusted = certificates.path("trusted.pem");
    std::fs::copy(others.path("ca.pem"), &trusted).unwrap();
    let client_ca = certificates.path("ca.pem");
    let tables = format!(
        "[tls]\n{}listeners = [\"http\"]\nclient_ca_file = {client_ca:?}\nca_file = {trusted:?}\n",
        certificates.table()
    );
    let fixture = AdminFixture::with_file("", &tables).await;
    let second = AdminFixture::in_cluster_of_with(&fixture, &tables).await;
    for each in [&fixture, &second] {
        each.push("app-1", 2).await;
    }
    let connector = certificates.connector(Some("client"), "http/1.1");
    let port = fixture.worker.addresses().http.port();
    let explain_app = || async {
        let request = "GET /api/v1/cluster/apps/app-1/explain";
        let answer = whole_answer(&connector, port, request).await.unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    };
    let until_answer = async |part: &str| {
        let began = tokio::time::Instant::now();
        loop {
            let answer = explain_app().await;
            if answer.contains(part) {
                return answer;
            }
            assert!(began.elapsed() < WAIT_MAX, "{part} is missing: {answer}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    until_answer("2 did not answer").await;
    std::fs::copy(certificates.path("ca.pem"), &trusted).unwrap();
    fixture.worker.reload("test").await.unwrap();
    let both = until_answer("\"worker_count\":2").await;
    assert!(both.contains("\"unanswered_count\":0"), "{both}");
    let same = fixture.worker.reload("test").await.unwrap();
    assert_eq!((same.changed.len(), same.waiting.len()), (0, 0), "{same:?}");
    second.finish().await;
    fixture.finish().await;
}

#[tokio::test]
async fn tls_can_be_disabled_per_listener() {
    let certificates = Certificates::make();
    let dir = tempfile::tempdir().unwrap();
    let tls = certificates.table() + "listeners = [\"http\"]";
    let worker = Worker::start(&parse(&config(dir.path(), &tls))).await.unwrap();
    let (http, admin) = (worker.addresses().http, worker.addresses().admin.unwrap());
    let known = certificates.connector(None, "http/1.1");
    assert_eq!(ask(&known, http.port(), "GET /health/live").await.unwrap(), "HTTP/1.1 200 OK");
    let admin = format!("http://{admin}/admin/flush");
    assert_eq!(reqwest::Client::new().post(admin).send().await.unwrap().status(), 200);
    ShuffleClient::connect(worker.addresses().grpc).await.unwrap();
    assert_eq!(worker.stop().await, 0);
}

/// A tool renews the certificates without notifying the worker. A key that does not match is
/// ignored.
#[tokio::test]
async fn renewed_certificates_are_reloaded() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    std::fs::write(&file, config(dir.path(), &certificates.table())).unwrap();
    let worker = start_from(&file).await;
    let port = worker.addresses().http.port();
    let works = |of: &Certificates| {
        let connector = of.connector(None, "http/1.1");
        async move { ask(&connector, port, "GET /health/live").await.is_ok() }
    };
    assert!(works(&certificates).await && !works(&others).await);

    std::fs::copy(others.path("server.key"), certificates.path("server.key")).unwrap();
    let reasons = worker.reload("test").await.unwrap_err();
    assert!(reasons.contains("tls.key_file") && reasons.contains("does not match"), "{reasons}");
    assert!(works(&certificates).await, "the old certificates no longer work");

    std::fs::copy(others.path("server.pem"), certificates.path("server.pem")).unwrap();
    let began = tokio::time::Instant::now();
    while !works(&others).await {
        assert!(began.elapsed() < WAIT_MAX, "the new certificate is not presented");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!works(&certificates).await);
    let same = worker.reload("test").await.unwrap();
    assert_eq!((same.changed.len(), same.waiting.len()), (0, 0), "{same:?}");
    assert_eq!(worker.stop().await, 0);
}

/// The successor in the same process keeps TLS on the listeners. A connection before its handshake
/// is handed over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_keeps_tls_and_requires_readable_certificates() {
    let certificates = Certificates::make();
    let tls = format!("[admin]\nport = 0\n[tls]\n{}doors = [\"grpc\", \"admin\"]", certificates.table());
    let setup = Setup { name: "upgraded with tls", capacity: "32M", made_tables: tls, ..Setup::default() };
    let mut worker = tokio::task::block_in_place(|| worker::WorkerProcess::start(&setup));
    let port = worker.ready().grpc_port;
    let connector = certificates.connector(None, "h2");
    assert_eq!(heartbeat(connector.clone(), port).await, Ok(4));
    let silent = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    tokio::task::block_in_place(|| {
        worker.begin_upgrade();
        worker.finish_upgrade();
    });
    assert_eq!(heartbeat_on(connector.clone(), silent).await, Ok(4));
    assert_eq!(heartbeat(connector.clone(), port).await, Ok(4));

    std::fs::write(certificates.path("server.pem"), "nothing").unwrap();
    tokio::task::block_in_place(|| {
        worker.begin_upgrade();
        worker.wait_log("upgrade refused; continuing as before");
    });
    assert!(worker.log().contains("tls.cert_file"), "{}", worker.log());
    assert_eq!(heartbeat(connector, port).await, Ok(4));
    tokio::task::block_in_place(|| worker.stop());

    let diskless = Setup { store_type: "MEMORY", ..setup };
    let refusal = tokio::task::block_in_place(|| worker::WorkerProcess::refused(&diskless));
    assert!(refusal.as_ref().is_ok_and(|refusal| refusal.contains("tls.cert_file")), "{refusal:?}");
}

#[tokio::test]
async fn invalid_tls_file_is_reported_with_its_key() {
    let (certificates, others) = (Certificates::make(), Certificates::make());
    let (cert, key) = (certificates.path("server.pem"), certificates.path("server.key"));
    let (missing, empty) = (certificates.path("missing.pem"), certificates.path("empty.pem"));
    let ca_file = |path: &Path| format!("[tls]\nca_file = {path:?}\n");
    std::fs::write(&empty, "nothing\n").unwrap();
    let dir = tempfile::tempdir().unwrap();
    for (path, parts) in
        [(&missing, ["tls.ca_file", "missing.pem"]), (&empty, ["tls.ca_file", "no certificate"])]
    {
        let refused = Worker::start(&parse(&config_text(dir.path(), "", &ca_file(path)))).await.unwrap_err();
        let text = format!("{refused:#}");
        assert!(parts.iter().all(|part| text.contains(part)), "the text lacks one of {parts:?}: {text}");
    }
    for (cert, key, client_ca, parts) in [
        (&missing, &key, None, ["tls.cert_file", "missing.pem"]),
        (&empty, &key, None, ["tls.cert_file", "no certificate"]),
        (&cert, &missing, None, ["tls.key_file", "missing.pem"]),
        (&cert, &cert, None, ["tls.key_file", "no private key"]),
        (&cert, &others.path("server.key"), None, ["tls.key_file", "does not match"]),
        (&cert, &key, Some(&empty), ["tls.client_ca_file", "no certificate"]),
    ] {
        let ca = client_ca.map(|path| format!("client_ca_file = {path:?}")).unwrap_or_default();
        let tls = format!("cert_file = {cert:?}\nkey_file = {key:?}\n{ca}");
        let error = Worker::start(&parse(&config(dir.path(), &tls))).await.unwrap_err();
        let text = format!("{error:#}");
        assert!(parts.iter().all(|part| text.contains(part)), "the text lacks one of {parts:?}: {text}");
    }
}
