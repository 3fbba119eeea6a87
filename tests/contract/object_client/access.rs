//! Access to the store: its probe at the start, credentials, and the certificates that the client
//! trusts.

use std::path::Path as File;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use uniffle_testkit::s3::faults::{On, ResponseFault};
use uniffle_testkit::s3::{ACCESS_KEY, S3Server, SECRET_KEY};
use uniffle_worker::runtime::Tasks;
use uniffle_worker::store::ObjectConfig;
use uniffle_worker::store::object::client::{Client, Failure, StoreRefusal, check_files};
use uniffle_worker::store::object::location::StoreEndpoint;
use uniffle_worker::store::object::{Credentials, Secret};

use super::fixture::{Opened, open, soon};

async fn write(opened: &Opened) -> Result<(), Failure> {
    let written = soon(opened.store.put(&Path::from("x"), PutPayload::from_static(b"x"))).await;
    written.map(drop).map_err(|error| Failure::classify(&error))
}

#[tokio::test]
async fn probe_leaves_no_objects() {
    let server = S3Server::start().await;
    let opened = open(&server.config("x"));
    soon(opened.client.probe("worker-1")).await.unwrap();
    assert_eq!((server.faults.requests(On::Put), server.faults.requests(On::Delete)), (1, 1));
    assert_eq!((server.faults.requests(On::Create), server.faults.requests(On::Abort)), (1, 1));
    assert!(!server.files().join("x/worker-1/.probe").exists());
    opened.end().await;
}

#[tokio::test]
async fn failed_probe_leaves_no_objects() {
    for step in [On::Get, On::List] {
        let server = S3Server::start().await;
        let opened = open(&server.config("x"));
        server.faults.plan(step, 1, &ResponseFault::Refuse(403, "AccessDenied"));
        soon(opened.client.probe("worker-1")).await.unwrap_err();
        assert_eq!((server.faults.requests(step), server.faults.requests(On::Delete)), (1, 1));
        assert!(!server.files().join("x/worker-1/.probe").exists(), "{step:?}");
        opened.end().await;
    }
}

#[tokio::test]
async fn failed_probe_names_step_and_remedy() {
    let server = S3Server::start().await;
    let no_retry = |config| ObjectConfig { retry_timeout: Duration::ZERO, ..config };
    let error_of = |config: ObjectConfig| async move {
        let opened = open(&config);
        let error = soon(opened.client.probe("worker-1")).await.unwrap_err();
        opened.end().await;
        let text = error.to_string();
        assert!(!text.contains(SECRET_KEY) && !format!("{error:?}").contains("wrong-secret"), "{text}");
        text
    };
    let wrong_secret = ObjectConfig { secret_key: Some(Secret::new("wrong-secret")), ..server.config("x") };
    let wrong_key = ObjectConfig { access_key: Some(Secret::new("nobody")), ..server.config("x") };
    let unsigned = ObjectConfig { credentials: Credentials::Unsigned, ..server.config("x") };
    for (config, refusal) in [
        (wrong_secret, StoreRefusal::WrongSecret),
        (wrong_key, StoreRefusal::UnknownKey),
        (unsigned, StoreRefusal::AccessDenied),
    ] {
        let text = error_of(no_retry(config)).await;
        assert!(text.contains("to write an object") && text.contains(refusal.remedy()), "{text}");
    }
    for (on, step) in [
        (On::Get, "read it"),
        (On::List, "list it"),
        (On::Delete, "delete it"),
        (On::Create, "start an upload"),
        (On::Abort, "abort an upload"),
    ] {
        server.faults.plan(on, 1, &ResponseFault::Refuse(403, "AccessDenied"));
        let text = error_of(no_retry(server.config("x"))).await;
        assert!(text.contains(step) && text.contains(StoreRefusal::AccessDenied.remedy()), "{text}");
    }
    server.faults.plan(On::Put, 1, &ResponseFault::Refuse(404, "NoSuchBucket"));
    assert!(error_of(no_retry(server.config("x"))).await.contains(StoreRefusal::BucketMissing.remedy()));
    server.faults.plan(On::Get, 1, &ResponseFault::WrongByte);
    assert!(error_of(server.config("x")).await.contains("wrong bytes"));
}

/// Writes a file of keys with `secret` and the lines `more`.
fn write_keys(file: &File, secret: &str, more: &str) {
    let text =
        format!("[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {secret}\n{more}");
    std::fs::write(file, text).unwrap();
}

#[tokio::test]
async fn wrong_keys_of_a_file_are_refused_until_renewed() {
    let (server, dir) = (S3Server::start().await, tempfile::tempdir().unwrap());
    let file = dir.path().join("keys");
    let config = ObjectConfig {
        credentials: Credentials::File,
        credentials_file: Some(file.clone()),
        access_key: None,
        secret_key: None,
        ..server.config("x")
    };
    assert!(check_files(&config)[0].to_string().starts_with("object_store.credentials_file: "));
    write_keys(&file, SECRET_KEY, "");
    let opened = open(&config);
    write(&opened).await.unwrap();
    write_keys(&file, SECRET_KEY, "expiration = 2001-01-01T00:00:00Z\n");
    assert_eq!(write(&opened).await, Err(Failure::Refused(StoreRefusal::CredentialsExpired)));
    assert_eq!(check_files(&config).len(), 1);
    write_keys(&file, "another secret of nobody".replace(' ', "-").as_str(), "");
    assert_eq!(write(&opened).await, Err(Failure::Refused(StoreRefusal::WrongSecret)));
    write_keys(&file, SECRET_KEY, "# renewed\n");
    write(&opened).await.unwrap();
    // Valid keys stay in use without the file.
    std::fs::remove_file(&file).unwrap();
    write(&opened).await.unwrap();
    opened.end().await;
}

#[tokio::test]
async fn missing_credentials_are_named_before_any_request() {
    let server = S3Server::start().await;
    let refused = |config: ObjectConfig| {
        let error =
            Client::open(&config, &Tasks::new(), &prometheus::Registry::new()).unwrap_err().to_string();
        assert_eq!(check_files(&config)[0].to_string(), error);
        error
    };
    let no_key = ObjectConfig { access_key: None, ..server.config("x") };
    assert!(refused(no_key).contains("AWS_ACCESS_KEY_ID"));
    let broken = ObjectConfig { secret_key: Some(Secret::new("hush hush")), ..server.config("x") };
    let text = refused(broken);
    assert!(text.contains("AWS_SECRET_ACCESS_KEY") && !text.contains("hush"), "{text}");
    let web = ObjectConfig { credentials: Credentials::WebIdentity, ..server.config("x") };
    assert!(refused(web.clone()).contains("AWS_ROLE_ARN"));
    let web = ObjectConfig { role_arn: Some("arn:aws:iam::1:role/x".to_owned()), ..web };
    assert!(refused(web.clone()).contains("AWS_WEB_IDENTITY_TOKEN_FILE"));
    let ca = ObjectConfig {
        endpoint: StoreEndpoint::parse("https://localhost:1").ok(),
        ca_file: Some("/nowhere/ca.pem".into()),
        ..server.config("x")
    };
    let text = refused(ca.clone());
    assert!(text.contains("object_store.ca_file") && text.contains("/nowhere/ca.pem"), "{text}");
    let none = ObjectConfig { access_key: None, secret_key: None, ..ca };
    let all = check_files(&none).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    for part in ["object_store.ca_file", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        assert!(all.contains(part), "{part}: {all}");
    }
}

/// Exchanges a token file for the keys of a role: STS is called once, and its keys sign later
/// requests.
#[tokio::test]
async fn web_identity_is_exchanged_for_keys() {
    let (server, dir) = (S3Server::start().await, tempfile::tempdir().unwrap());
    let token = dir.path().join("token");
    std::fs::write(&token, "the-token").unwrap();
    let answer = format!(
        "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
         <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{ACCESS_KEY}</AccessKeyId>\
         <SecretAccessKey>{SECRET_KEY}</SecretAccessKey><SessionToken>lent</SessionToken>\
         <Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>\
         </AssumeRoleWithWebIdentityResponse>"
    );
    // The fault layer acts as STS. It takes the client's POST to the root for the completion of an
    // upload.
    server.faults.plan(On::Complete, 1, &ResponseFault::Text(answer));
    let config = ObjectConfig {
        credentials: Credentials::WebIdentity,
        role_arn: Some("arn:aws:iam::1:role/x".to_owned()),
        web_identity_token_file: Some(token),
        sts_endpoint: Some(server.endpoint()),
        access_key: None,
        secret_key: None,
        ..server.config("x")
    };
    let opened = open(&config);
    // A wrong signature would be another refusal. Whether keys with a session token are accepted is
    // up to s3s.
    for _ in 0..2 {
        match write(&opened).await {
            Ok(()) | Err(Failure::Refused(StoreRefusal::CredentialsExpired)) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(server.faults.requests(On::Complete), 1);
    assert_eq!(opened.metric("object_store_requests{operation=\"credentials\"}"), 1.0);
    opened.end().await;
}

/// Puts TLS in front of `server`. Returns the port and the PEM of the authority that signed the
/// certificate.
async fn behind_tls(server: &S3Server, tasks: &Tasks) -> (u16, String) {
    let mut authority = CertificateParams::default();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
        )
        .unwrap();
    let (acceptor, store) = (TlsAcceptor::from(Arc::new(config)), server.address());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (connections, cancelled) = (tasks.clone(), tasks.cancelled());
    let accept = async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, cancelled) = (acceptor.clone(), connections.cancelled());
            let carry = async move {
                let Ok(mut outer) = acceptor.accept(stream).await else { return };
                let mut inner = TcpStream::connect(store).await.unwrap();
                drop(tokio::io::copy_bidirectional(&mut outer, &mut inner).await);
            };
            connections.spawn("tls", async move {
                tokio::select! {
                    () = cancelled => {}
                    () = carry => {}
                }
            });
        }
    };
    tasks.spawn("tls accept", async move {
        tokio::select! {
            () = cancelled => {}
            () = accept => {}
        }
    });
    (port, authority.pem())
}

#[tokio::test]
async fn server_is_trusted_by_certificate_only() {
    let (server, front, dir) = (S3Server::start().await, Tasks::new(), tempfile::tempdir().unwrap());
    let (port, authority) = behind_tls(&server, &front).await;
    let (_, stranger) = behind_tls(&server, &front).await;
    let ca_file = dir.path().join("ca.pem");
    std::fs::write(&ca_file, authority).unwrap();
    let config = ObjectConfig {
        endpoint: StoreEndpoint::parse(&format!("https://localhost:{port}")).ok(),
        ca_file: Some(ca_file.clone()),
        ..server.config("x")
    };
    let opened = open(&config);
    write(&opened).await.unwrap();
    soon(opened.client.probe("worker-1")).await.unwrap();
    opened.end().await;

    std::fs::write(&ca_file, stranger).unwrap();
    let opened = open(&config);
    assert_eq!(write(&opened).await, Err(Failure::Refused(StoreRefusal::NotTrusted)));
    opened.end().await;
    front.cancel();
    soon(front.drained()).await;
}
