//! The benches. Their figures decide nothing on a shared machine: in CI they must build, run and end.

use std::fs;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::process::{Cmd, Deadline};
use crate::workspace::Workspace;

/// For one bench: under 90 seconds where nothing else runs, most of it the build of the census.
const PATIENCE: Duration = Duration::from_secs(300);

/// Every bench as it is meant, optimised: hours.
pub(crate) fn full(ws: &Workspace) -> Result<()> {
    ws.cargo(["bench"]).run()
}

/// Every bench as short as it goes.
///
/// The server's is left out: it needs one more build of the server.
pub(crate) fn smoke(ws: &Workspace) -> Result<()> {
    cargo(ws).arg("--no-run").run()?;
    for name in ["percpu", "radix_ctx", "percpu_list", "mq_rbtree", "bufcache", "aio_reap"] {
        run(ws, name, &["--smoke"])?;
    }
    // One seed is enough to make a page; the benches above have measured all of them.
    let report = ws.target.join("report");
    let report = report.to_str().ok_or_else(|| Error::new("the target folder is not in UTF-8"))?;
    run(ws, "seeds", &["--smoke", "--only", "mq_rbtree", "--report", report])?;
    let page = ws.target.join("report/README.md");
    if fs::metadata(&page).map_or(0, |page| page.len()) == 0 {
        return Err(Error::new(format!("{} was not written", page.display())));
    }
    for only in ["counter", "radix", "list", "buf", "served"] {
        run(ws, "census", &["--smoke", "--only", only])?;
    }
    Ok(())
}

fn run(ws: &Workspace, name: &str, options: &[&str]) -> Result<()> {
    let bench = cargo(ws).args(["--bench", name, "--"]).args(options.iter().copied());
    bench.deadline(Deadline::after(PATIENCE)).run()
}

/// In the profile of the stress tests, which is built fast. `--workspace` each time: the features of
/// fewer packages would compile everything anew.
fn cargo(ws: &Workspace) -> Cmd {
    ws.cargo(["bench", "--profile", "stress", "--workspace"])
}
