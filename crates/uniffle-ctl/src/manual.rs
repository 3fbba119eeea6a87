//! Shell completions and manual pages, made of the whole program's command line.

use std::io;
use std::path::Path;

use clap::Command;
pub use clap_complete::Shell;

/// The completions of `command` for `shell`.
#[must_use]
pub fn complete(mut command: Command, shell: Shell) -> Vec<u8> {
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, name, &mut text);
    text
}

/// The manual page of `command`; with a directory the pages of all its subcommands too, as files there.
///
/// # Errors
/// A file cannot be written.
pub fn manual(command: Command, directory: Option<&Path>) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    match directory {
        Some(directory) => clap_mangen::generate_to(command, directory)?,
        None => clap_mangen::Man::new(command).render(&mut text)?,
    }
    Ok(text)
}
