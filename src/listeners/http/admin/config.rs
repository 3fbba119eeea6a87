//! Settings of the administration listener.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use super::token::Token;
use crate::schema::kind::{ip_address, optional, path, port, secret};
use crate::schema::section;

section! {
    /// Settings of the administration listener.
    #[table(
        "admin",
        "Administration: all HTTP calls that change the worker's state. Disabled without a port; \
         grpc_decommission applies in any case."
    )]
    pub struct AdminConfig {
        /// Port; 0 = any free one. Default: none, administration is disabled.
        #[key("admin.port", optional(port()), Restart, example "19997")]
        pub port: Option<u16> = None,
        /// Listening address; any address except a loopback one requires a token.
        #[key("admin.bind_address", ip_address(), Restart)]
        pub bind_address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST),
        /// File with the bearer token of callers, at least 16 characters; or set
        /// WORKER_ADMIN_TOKEN. Default: none; local callers need no token.
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
