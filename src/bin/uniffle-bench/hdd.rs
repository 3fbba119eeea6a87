//! A rotating disk by its arithmetic. (Placeholder.)
use crate::options::HddArgs;
use crate::report::Report;

pub(crate) async fn run(_: &HddArgs) -> anyhow::Result<Report> {
    anyhow::bail!("not built yet")
}
