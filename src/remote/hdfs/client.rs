//! Implements the eight calls on a real HDFS with `hdfs-native`, without a JVM and libhdfs.
//!
//! Creating a client may call GSSAPI and resolvers, which block. It is therefore created at the
//! first call, on a blocking thread. Like the Java server, a [`RemoteConnector`] overlays the
//! worker's own Hadoop settings with those of the client.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt as _;
use hdfs_native::file::FileWriter;
use hdfs_native::{Client, ClientBuilder, HdfsError, WriteOptions};
use tokio::sync::OnceCell;

use super::hadoop::{self, HadoopConf};
use super::kerberos::Login;
use super::location::NAMENODE_PORT;
use super::{FsFuture, RemoteConnector, RemoteEntry, RemoteFs, RemoteLocation, RemoteStorage, RemoteTarget};
use crate::store::{StoreError, StoreErrorKind};
use uniffle_io::BoxFuture;

/// Mode that Hadoop's own client gives directories under its default umask.
const DIRECTORY_MODE: u32 = 0o755;
/// Maximum number of bytes passed to the writer at a time.
const WRITE_BYTES_MAX: usize = 1 << 20;
/// Limit of attempts to reach a NameNode within one call. The worker has its own, longer retries.
const FAILOVER_ATTEMPTS: (&str, &str) = ("dfs.client.failover.max.attempts", "4");

/// Creates clients of real file systems.
#[derive(Debug)]
pub struct HdfsConnector {
    /// Settings of the worker (`HADOOP_CONF_DIR`).
    pub conf: HadoopConf,
    /// Login of the worker for secure clusters.
    pub login: Login,
}

impl HdfsConnector {
    fn overlaid(&self, items: &[(String, String)]) -> HadoopConf {
        let mut conf = self.conf.clone();
        conf.overlay(items);
        if self.login.is_required() {
            conf.overlay(&[(hadoop::AUTHENTICATION.to_owned(), "kerberos".to_owned())]);
        }
        conf
    }
}

impl RemoteConnector for HdfsConnector {
    fn target(&self, storage: &RemoteStorage, location: RemoteLocation) -> Result<RemoteTarget, StoreError> {
        let conf = hadoop::relevant(&storage.conf)
            .map_err(|why| StoreError::remote(StoreErrorKind::Denied, &storage.path, why))?;
        let effective = self.overlaid(&conf);
        let user = match effective.is_secure() {
            true => self.login.user_to_act_as(&storage.user),
            false => None,
        };
        Ok(RemoteTarget { location, conf, user })
    }

    fn connect(&self, target: &RemoteTarget) -> Result<Arc<dyn RemoteFs>, StoreError> {
        let mut conf = self.overlaid(&target.conf);
        conf.set_default(FAILOVER_ATTEMPTS.0, FAILOVER_ATTEMPTS.1);
        let secure = conf.is_secure();
        let url = url_of(&target.location, &conf);
        let login = secure.then(|| self.login.clone());
        Ok(Arc::new(HdfsFs(Arc::new(HdfsConnection {
            url,
            conf: conf.into_map(),
            login,
            user: target.user.clone(),
            client: OnceCell::new(),
        }))))
    }
}

/// Returns the URL of a file system. A host without port that is not a nameservice is a NameNode at
/// the default port.
fn url_of(location: &RemoteLocation, conf: &HadoopConf) -> String {
    let (scheme, host) = (location.scheme(), location.host());
    match location.port() {
        Some(port) => format!("{scheme}://{host}:{port}"),
        None if scheme == "hdfs" && !conf.is_nameservice(host) => format!("hdfs://{host}:{NAMENODE_PORT}"),
        None => format!("{scheme}://{host}"),
    }
}

#[derive(Debug)]
struct HdfsConnection {
    url: String,
    conf: HashMap<String, String>,
    login: Option<Login>,
    user: Option<String>,
    client: OnceCell<Client>,
}

impl HdfsConnection {
    async fn client(&self) -> Result<&Client, StoreError> {
        let make = || async {
            let mut builder = ClientBuilder::new().with_url(&self.url).with_config(self.conf.clone());
            if let Some(user) = &self.user {
                builder = builder.with_user(user);
            }
            if let Some(login) = &self.login {
                builder = login.apply(builder);
            }
            let made = tokio::task::spawn_blocking(move || builder.build()).await;
            let made = made.map_err(|error| StoreError::io(&self.url, std::io::Error::other(error)))?;
            made.map_err(|error| failed(&self.url, error))
        };
        self.client.get_or_try_init(make).await
    }
}

/// View of a file system as one user. All of its paths share a connection.
#[derive(Debug)]
struct HdfsFs(Arc<HdfsConnection>);

/// Runs `$body` with the client and the path, and converts its error.
macro_rules! call {
    ($self:ident, $path:ident, |$client:ident| $body:expr) => {{
        let (connection, $path) = (Arc::clone(&$self.0), $path.to_owned());
        async move {
            let $client = connection.client().await?;
            let result: Result<_, HdfsError> = async { $body }.await;
            result.map_err(|error| failed(&$path, error))
        }
        .boxed()
    }};
}

impl RemoteFs for HdfsFs {
    fn make_dirs(&self, path: &str) -> FsFuture<()> {
        call!(self, path, |client| client.mkdirs(&path, DIRECTORY_MODE, true).await)
    }

    fn create(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()> {
        call!(self, path, |client| {
            let writer = client.create(&path, WriteOptions::default()).await?;
            let written = write_and_close(writer, data).await;
            if written.is_err() {
                // The file is ours since `create` succeeded, and no reader needs it. It would only
                // occupy space.
                drop(client.delete(&path, false).await);
            }
            written
        })
    }

    fn append(&self, path: &str, data: Vec<Bytes>) -> FsFuture<()> {
        call!(self, path, |client| write_and_close(client.append(&path).await?, data).await)
    }

    fn recover(&self, path: &str) -> FsFuture<bool> {
        call!(self, path, |client| client.recover_lease(&path).await)
    }

    fn list(&self, path: &str) -> FsFuture<Vec<RemoteEntry>> {
        call!(self, path, |client| {
            let entries = client.list_status(&path, false).await?.into_iter().map(|status| RemoteEntry {
                name: status.path.rsplit('/').next().unwrap_or_default().to_owned(),
                is_dir: status.isdir,
                length: status.length as u64,
            });
            Ok(entries.collect())
        })
    }

    fn delete(&self, path: &str, recursive: bool) -> FsFuture<bool> {
        call!(self, path, |client| client.delete(&path, recursive).await)
    }

    fn read(&self, path: &str) -> FsFuture<Bytes> {
        call!(self, path, |client| {
            let reader = client.read(&path).await?;
            reader.read_range(0, reader.file_length()).await
        })
    }

    fn read_range(&self, path: &str, offset: u64, length: usize) -> FsFuture<Bytes> {
        call!(self, path, |client| {
            let reader = client.read(&path).await?;
            // The reader panics beyond the end.
            let start = usize::try_from(offset).unwrap_or(usize::MAX).min(reader.file_length());
            let length = length.min(reader.file_length() - start);
            reader.read_range(start, length).await
        })
    }
}

/// Writes and closes a file. An error at the close is a failed write, because only closing confirms
/// the bytes (docs/protocol.md §11 close-error). The writer's futures have tens of KiB, hence the
/// boxes.
fn write_and_close(mut writer: FileWriter, data: Vec<Bytes>) -> BoxFuture<'static, Result<(), HdfsError>> {
    Box::pin(async move {
        for mut piece in data {
            while !piece.is_empty() {
                let next = piece.split_to(piece.len().min(WRITE_BYTES_MAX));
                Box::pin(writer.write_bytes(next)).await?;
            }
        }
        Box::pin(writer.close()).await
    })
}

fn failed(path: &str, error: HdfsError) -> StoreError {
    // The exception of a NameNode includes its stack trace.
    let text = error.to_string();
    StoreError::remote(kind_of(&error), path, text.lines().next().unwrap_or_default().trim_end())
}

/// Classifies an error by the reaction of the caller.
fn kind_of(error: &HdfsError) -> StoreErrorKind {
    match error {
        HdfsError::FileNotFound(_) => StoreErrorKind::NotFound,
        HdfsError::AlreadyExists(_) => StoreErrorKind::Exists,
        HdfsError::SASLError(_) | HdfsError::GSSAPIError(..) | HdfsError::NoSASLMechanism => {
            StoreErrorKind::Denied
        }
        HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text) => rpc_kind(class, text),
        HdfsError::IOError(error) => match error.kind() {
            std::io::ErrorKind::NotFound => StoreErrorKind::Io,
            _ => StoreErrorKind::Unreachable,
        },
        HdfsError::ChecksumError => StoreErrorKind::Corrupt,
        _ => StoreErrorKind::Io,
    }
}

/// Classifies the exception of a NameNode.
fn rpc_kind(class: &str, text: &str) -> StoreErrorKind {
    let name = class.rsplit(['.', '$']).next().unwrap_or(class);
    match name {
        "FileNotFoundException" => StoreErrorKind::NotFound,
        "AccessControlException" | "AuthorizationException" | "SaslException" | "InvalidToken" => {
            StoreErrorKind::Denied
        }
        "SafeModeException" | "RetriableException" | "StandbyException" | "ServerNotRunningYetException" => {
            StoreErrorKind::Unreachable
        }
        _ if name.ends_with("QuotaExceededException") => StoreErrorKind::NoSpace,
        // Older NameNodes wrap the exception.
        _ if text.contains("Name node is in safe mode") => StoreErrorKind::Unreachable,
        _ => StoreErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exceptions_are_classified_by_remedy() {
        let kind = |class: &str| rpc_kind(class, "");
        assert_eq!(kind("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException"), StoreErrorKind::NoSpace);
        assert_eq!(
            kind("org.apache.hadoop.hdfs.server.namenode.SafeModeException"),
            StoreErrorKind::Unreachable
        );
        assert_eq!(kind("org.apache.hadoop.security.AccessControlException"), StoreErrorKind::Denied);
        assert_eq!(
            kind("org.apache.hadoop.security.token.SecretManager$InvalidToken"),
            StoreErrorKind::Denied
        );
        assert_eq!(kind("java.io.FileNotFoundException"), StoreErrorKind::NotFound);
        assert_eq!(kind("java.io.IOException"), StoreErrorKind::Io);
        assert_eq!(
            rpc_kind("java.io.IOException", "x Name node is in safe mode."),
            StoreErrorKind::Unreachable
        );
    }

    #[test]
    fn ports_and_nameservices_reach_the_client() {
        let url = |text: &str, conf: &[(&str, &str)]| {
            let mut effective = HadoopConf::default();
            let conf: Vec<_> =
                conf.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            effective.overlay(&conf);
            url_of(&RemoteLocation::parse(text).unwrap(), &effective)
        };
        assert_eq!(url("hdfs://nn:9000/x", &[]), "hdfs://nn:9000");
        assert_eq!(url("hdfs://nn/x", &[]), "hdfs://nn:8020");
        assert_eq!(url("hdfs://ns/x", &[("dfs.ha.namenodes.ns", "a,b")]), "hdfs://ns");
        assert_eq!(url("viewfs://table/x", &[]), "viewfs://table");
    }
}
