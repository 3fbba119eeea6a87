//! Progress bars of commands that wait: one per worker, or one for the whole command (`upgrade`,
//! `orphans`).
//!
//! They are drawn on stderr, and only if stdout and stderr are terminals.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Interval at which the elapsed time is redrawn.
const REDRAW_INTERVAL: Duration = Duration::from_millis(500);

/// The bars of a command.
pub(crate) struct CommandProgress(MultiProgress);

impl CommandProgress {
    pub(crate) fn new() -> Self {
        let target = match std::io::stdout().is_terminal() {
            true => ProgressDrawTarget::stderr(),
            false => ProgressDrawTarget::hidden(),
        };
        Self(MultiProgress::with_draw_target(target))
    }

    /// Adds a bar for `name`.
    pub(crate) fn bar(&self, name: &str) -> CommandBar {
        let bar = self.0.add(ProgressBar::new(0));
        if let Ok(style) = ProgressStyle::with_template("{prefix} {bar:20} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.set_prefix(name.to_owned());
        if !bar.is_hidden() {
            bar.enable_steady_tick(REDRAW_INTERVAL);
        }
        CommandBar(bar)
    }
}

/// A progress bar. It disappears on drop.
pub(crate) struct CommandBar(ProgressBar);

impl CommandBar {
    /// Shows `text` and the part that is done. The largest `remaining` so far is the whole.
    pub(crate) fn show(&self, remaining: u64, text: impl Into<String>) {
        let length = self.0.length().unwrap_or(0).max(remaining);
        self.0.set_length(length);
        self.0.set_position(length - remaining);
        self.0.set_message(text.into());
    }
}

impl Drop for CommandBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_length_is_the_largest_remaining_value() {
        let bar = CommandProgress(MultiProgress::with_draw_target(ProgressDrawTarget::hidden())).bar("w-1");
        for (remaining, expected) in [(10, (0, 10)), (4, (6, 10)), (20, (0, 20)), (0, (20, 20))] {
            bar.show(remaining, "bytes");
            assert_eq!((bar.0.position(), bar.0.length().unwrap()), expected);
        }
    }
}
