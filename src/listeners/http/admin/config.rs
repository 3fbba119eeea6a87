//! Settings of the administration listener.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use super::token::Token;
use crate::schema::kind::{ip_address, optional, path, port, secret};
use crate::schema::section;

section! {
    /// Settings of the administration listener.
    #[table("admin", "Administration: everything over HTTP that changes the worker's state. Off without a port.")]
    pub struct AdminConfig {
        /// Port; 0 = any free one. Default: none, there is no administration.
        #[key("admin.port", optional(port()), Restart, example "19997")]
        pub port: Option<u16> = None,
        /// Any address but a loopback one needs a token.
        #[key("admin.bind_address", ip_address(), Restart)]
        pub bind_address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST),
        /// File with the bearer token that callers must show, at least 16 characters; WORKER_ADMIN_TOKEN holds it otherwise.
        /// Default: none, callers on this machine need none.
        #[key("admin.token_file", optional(path()), Restart, example "\"/etc/uniffle-worker/admin.token\"")]
        pub token_file: Option<PathBuf> = None,
        /// The bearer token itself.
        #[env("WORKER_ADMIN_TOKEN", optional(secret("16 to 1024 printable characters", parse_token)))]
        pub token: Option<Token> = None,
    }
}

fn parse_token(text: &str) -> Result<Token, String> {
    Token::parse(text).map_err(|error| error.to_string())
}
