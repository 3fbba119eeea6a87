//! The calls of the administration that need more than the service, and its token.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;

use crate::config::{self, Config};
use crate::listeners::http::admin::{AdminHooks, Token};
use crate::service::Service;

use super::reload::{Reloaded, Reloader};
use super::settings::RuntimeSettings;

/// Largest token file read.
const TOKEN_FILE_BYTES_MAX: u64 = 4 << 10;

/// The calls that need more than the service.
pub(super) fn hooks(
    service: Arc<Service>,
    settings: &Arc<RuntimeSettings>,
    reloader: Arc<Reloader>,
) -> AdminHooks {
    let (tags, log) = (Arc::clone(settings), Arc::clone(settings));
    let set_tags = move |wanted: Vec<String>| {
        config::check_tags(&wanted)?;
        tags.set_tags(wanted);
        Ok(())
    };
    let set_log_filter = move |filter: &str| log.set_log_filter(filter);
    let reload = move || {
        let Reloaded { changed, waiting } = reloader.reload("call")?;
        Ok((changed, waiting))
    };
    AdminHooks {
        service,
        set_tags: Arc::new(set_tags),
        set_log_filter: Arc::new(set_log_filter),
        reload: Arc::new(reload),
    }
}

/// The token that callers must show, if there is one.
pub(super) fn token(config: &Config) -> anyhow::Result<Option<Token>> {
    let Some(path) = &config.admin.token_file else { return Ok(config.admin.token.clone()) };
    let read = || -> anyhow::Result<Token> { Ok(Token::parse(&small_file(path)?)?) };
    read().map(Some).with_context(|| format!("admin.token_file = {}", path.display()))
}

fn small_file(path: &Path) -> std::io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > TOKEN_FILE_BYTES_MAX {
        return Err(std::io::Error::other("not a small ordinary file"));
    }
    std::fs::read_to_string(path)
}
