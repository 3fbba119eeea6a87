//! Administration calls that need more than the service, and the token for them.

use anyhow::Context as _;

use crate::config::{self, Config};
use crate::listeners::http::admin::{Control, Token};
use crate::schema::files;

use super::reload::{Reloaded, Reloader};

/// Largest token file read.
const TOKEN_FILE_BYTES_MAX: u64 = 4 << 10;

impl Control for Reloader {
    fn set_tags(&self, tags: Vec<String>) -> Result<(), String> {
        config::check_tags(&tags)?;
        self.live.set_tags(tags);
        Ok(())
    }

    fn set_log_filter(&self, filter: &str) -> Result<(), String> {
        self.live.set_log_filter(filter)
    }

    fn reload(&self) -> Result<(Vec<String>, Vec<String>), String> {
        let Reloaded { changed, waiting } = self.read_again("call")?;
        Ok((changed, waiting))
    }
}

/// Returns the token required from callers, if one is configured.
pub(super) fn token(config: &Config) -> anyhow::Result<Option<Token>> {
    let Some(path) = &config.admin.token_file else { return Ok(config.admin.token.clone()) };
    let read =
        || -> anyhow::Result<Token> { Ok(Token::parse(&files::read_text(path, TOKEN_FILE_BYTES_MAX)?)?) };
    read().map(Some).with_context(|| format!("admin.token_file = {}", path.display()))
}
