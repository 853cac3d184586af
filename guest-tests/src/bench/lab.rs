//! Time from the start of `pvrdma-lab` until a program has exchanged a message between two guests.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use super::figure::Figure;
use crate::image::GuestImage;
use crate::vm::has_kvm;

/// Target in seconds, for emulated processors.
const TARGET: f64 = 20.0;

/// Boots the guests `runs` times.
pub(super) fn measure(runs: usize) -> Result<Vec<Figure>> {
    let image = GuestImage::build()?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let folder = tempfile::tempdir().context("cannot create a directory")?;
    let mut times = Vec::new();
    for run in 1..=runs {
        let mut lab = Command::new(&own);
        lab.args(["lab", "run", "--", "sh", "-c", PINGPONG]).current_dir(folder.path()).stdin(Stdio::null());
        let started = Instant::now();
        let output = lab.env("PVRDMA_BED_DIR", image.directory()).output().context("cannot run the lab")?;
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        ensure!(output.status.success(), "{}: {text}", output.status);
        // The guests end as soon as the message has arrived.
        times.push(started.elapsed().as_secs_f64());
        eprintln!("lab, run {run}: {:.1} s", times.last().copied().unwrap_or_default());
    }
    let processor = if has_kvm() { "KVM" } else { "emulated processors" };
    let title = format!("pvrdma-lab: two guests, a message between them, and their end ({processor})");
    Ok(vec![Figure::against_target("lab/first-message", title, "s", true, times, TARGET)])
}

const PINGPONG: &str = r#"
if [ "$PVRDMA_LAB_NUMBER" = 0 ]; then
    ibv_rc_pingpong -n 1 -g "$PVRDMA_LAB_GID_INDEX"
else
    until ibv_rc_pingpong -n 1 -g "$PVRDMA_LAB_GID_INDEX" vm0; do sleep 0.2; done
fi
"#;
