//! Shell completions and manual pages, generated from the program's command line.

use std::io;
use std::path::Path;

use clap::Command;
pub use clap_complete::Shell;

/// Returns the completions of `command` for `shell`.
#[must_use]
pub fn complete(mut command: Command, shell: Shell) -> Vec<u8> {
    let name = command.get_name().to_owned();
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, &name, &mut text);
    match (shell, String::from_utf8(text)) {
        (Shell::Bash, Ok(script)) => with_one_spelling(&name, &script).into_bytes(),
        (_, Ok(script)) => script.into_bytes(),
        (_, Err(error)) => error.into_bytes(),
    }
}

/// Repairs bash completions of a program whose name has a hyphen.
///
/// clap_complete spells the states of a line differently from the cases that look them up, so that
/// subcommands have no completions (<https://github.com/clap-rs/clap/issues/6421>). Has no effect
/// once both spellings agree.
fn with_one_spelling(name: &str, script: &str) -> String {
    let state = |hyphen| format!("{}__subcmd__", name.replace('-', hyphen));
    script.replace(&state("__subcmd__"), &state("__"))
}

/// Returns the manual page of `command`. With a directory, writes it and the pages of all its
/// subcommands as files there instead.
///
/// # Errors
/// Fails if a file cannot be written. The text names the directory.
pub fn manual(command: Command, directory: Option<&Path>) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    match directory {
        Some(directory) => clap_mangen::generate_to(command, directory).map_err(|error| {
            let hint = "it must exist and be writable";
            io::Error::new(error.kind(), format!("{}: {error}; {hint}", directory.display()))
        })?,
        None => clap_mangen::Man::new(command).render(&mut text)?,
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_directory_is_named() {
        let directory = std::env::temp_dir().join("uniffle-ctl-no-such-directory/pages");
        let error = manual(Command::new("x"), Some(&directory)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", directory.display())), "{error}");
        assert!(error.contains("must exist"), "{error}");
    }
}
