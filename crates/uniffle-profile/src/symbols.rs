//! The child's side of `child`: resolves places of a job with the debug information of this
//! program. Also resolves addresses that a user copies from the log of a panic.

use std::ffi::c_void;
use std::io::{Read, Write};

use anyhow::Context as _;
use rustix::process::{Signal, set_parent_process_death_signal, setpriority_process};

use super::child::PROGRAM;
use super::job::{PlaceNames, RenderJob, Symbol};
use super::maps::{AddressTable, Maps, Position};
use super::{render, wire};

/// Size limit of a job: the maximum number of stacks with the maximum depth, a few bytes per frame.
const QUESTION_BYTES_MAX: u64 = 64 << 20;

/// Answers one question on stdin.
///
/// Reading debug information takes seconds of CPU time and about 200 MiB in this process. It is
/// killed when its parent ends, has the lowest priority, and is the OOM killer's first choice.
///
/// # Errors
/// If the question is invalid, or the answer cannot be written.
pub fn answer_on_stdin() -> anyhow::Result<()> {
    // Each setting is optional: the answer is the same without it.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let _ = setpriority_process(None, 19);
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    answer(&mut std::io::stdin().lock(), &mut std::io::stdout().lock())
}

fn answer(question: &mut impl Read, answer: &mut impl Write) -> anyhow::Result<()> {
    let question = wire::read(question, wire::QUESTION, QUESTION_BYTES_MAX).context("no request on stdin")?;
    let job: RenderJob =
        postcard::from_bytes(&question).context("the request is from another version of the program")?;
    drop(question);
    let maps = Maps::of_this_process();
    let names = PlaceNames::new(&job.places, |position| {
        maps.address(&job.places, position).map(symbols).unwrap_or_default()
    });
    let made = render::made(&job, &names)?;
    wire::write(answer, wire::ANSWER, &made).context("cannot write the response")
}

/// Resolves addresses in the file of this program, separated by white space. Returns a line per
/// function at each address, innermost first, or one line with `?`.
///
/// # Errors
/// If a word is not an address, or the path of the program is unknown.
pub fn name_addresses(addresses: &str) -> Result<String, String> {
    let program = std::fs::read_link(PROGRAM).map_err(|error| format!("{PROGRAM}: {error}"))?;
    let (maps, program) = (Maps::of_this_process(), program.to_string_lossy().into_owned());
    let places = AddressTable { files: vec![program], positions: Vec::new() };
    let mut lines = Vec::new();
    for text in addresses.split_whitespace() {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let offset = u64::from_str_radix(digits, 16).map_err(|error| format!("{text}: {error}"))?;
        let position = Position { file: Some(0), offset };
        let found = maps.address(&places, position).map(symbols).unwrap_or_default();
        if found.is_empty() {
            lines.push(format!("{text} ?\n"));
        }
        for Symbol { name, file, line, .. } in found {
            lines.push(format!("{text} {name} {file}:{line}\n"));
        }
    }
    Ok(lines.concat())
}

/// Returns the functions at an instruction, innermost first.
fn symbols(address: u64) -> Vec<Symbol> {
    let mut found = Vec::new();
    // `resolve` expects a return address and looks up the call before it.
    let Ok(after) = usize::try_from(address.saturating_add(1)) else { return found };
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(after), |symbol| {
        let Some(name) = symbol.name() else { return };
        found.push(Symbol {
            name: format!("{name:#}"),
            system_name: String::from_utf8_lossy(name.as_bytes()).into_owned(),
            file: symbol.filename().map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
            line: symbol.lineno().unwrap_or(0),
            column: symbol.colno().unwrap_or(0),
        });
    });
    found
}

#[cfg(test)]
mod tests {
    use super::super::job::{ProfileJob, WaitingTasks, Waits};
    use super::super::maps::AddressSet;
    use super::*;

    fn answer_to(question: &[u8]) -> Result<String, String> {
        let mut output = Vec::new();
        answer(&mut &*question, &mut output).map_err(|error| format!("{error:#}"))?;
        let made = wire::read(&mut output.as_slice(), wire::ANSWER, 1 << 20).unwrap();
        Ok(String::from_utf8(made).unwrap())
    }

    fn question(message: &[u8]) -> Vec<u8> {
        let mut question = Vec::new();
        wire::write(&mut question, wire::QUESTION, message).unwrap();
        question
    }

    /// Resolves this function, and an address without a function.
    fn job() -> RenderJob {
        let mut addresses = AddressSet::default();
        let here = u64::try_from(job as fn() -> RenderJob as usize).unwrap();
        let stacks = vec![vec![addresses.number(here)], vec![addresses.number(16)]];
        let groups = vec![WaitingTasks { name: "test".to_owned(), tasks: 1, stacks }];
        let waits = Waits { summary: String::new(), groups, left_out: 0 };
        RenderJob { places: addresses.into_table(&Maps::of_this_process()), what: ProfileJob::Waits(waits) }
    }

    #[test]
    fn functions_of_this_program_are_named() {
        let text = answer_to(&question(&postcard::to_allocvec(&job()).unwrap())).unwrap();
        assert!(text.contains("╼ job at ") && text.contains("symbols.rs:"), "{text}");
        assert!(text.contains("╼ 0x10\n"), "{text}");
    }

    #[test]
    fn addresses_of_a_log_are_named() {
        let maps = Maps::of_this_process();
        let mut addresses = AddressSet::default();
        addresses.number(u64::try_from(job as fn() -> RenderJob as usize).unwrap());
        let offset = addresses.into_table(&maps).positions[0].offset;
        let text = name_addresses(&format!(" {offset:#x}\n0x0 ")).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with(&format!("{offset:#x} ")) && lines[0].contains("job "), "{text}");
        assert!(lines[0].contains("symbols.rs:") && lines.last() == Some(&"0x0 ?"), "{text}");
        assert!(name_addresses("main").unwrap_err().starts_with("main: "));
    }

    #[test]
    fn invalid_job_is_refused() {
        assert!(answer_to(b"").unwrap_err().starts_with("no request on stdin: "));
        let whole = postcard::to_allocvec(&job()).unwrap();
        for message in [&whole[..whole.len() / 2], &[0xff; 40], b"\x07"] {
            let why = answer_to(&question(message)).unwrap_err();
            assert!(why.starts_with("the request is from another version of the program"), "{why}");
        }
    }
}
