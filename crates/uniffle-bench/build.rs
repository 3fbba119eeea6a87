//! Finds the commit that `--version` shows.

#[path = "../../proto/commit.rs"]
mod commit;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    commit::record()
}
