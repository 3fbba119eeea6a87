//! Names the file from which `--version` takes the commit.

#[path = "../../proto/commit.rs"]
mod commit;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    commit::record()
}
