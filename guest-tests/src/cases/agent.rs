//! Tests of the guest image itself, on which all other tests rely.

use std::time::Duration;

use anyhow::{Result, bail};

use super::case::Case;
use crate::pair::{Link, Pair};

/// Requests to the agent.
pub(crate) fn cases() -> Vec<Case> {
    vec![Case::new("bed/agent", agent)]
}

fn agent(pair: &mut Pair, _link: &Link) -> Result<String> {
    let vm = pair.a();
    let content: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
    vm.write_file("/tmp/pieces", 0o640, &content)?;
    let output = vm.run("stat -c '%s %a' /tmp/pieces; od -An -t u4 -j 399996 /tmp/pieces; rm /tmp/pieces")?;
    if output.split_whitespace().collect::<Vec<_>>() != ["400000", "640", "99999"] {
        bail!("a file arrived in a wrong way: {output}");
    }
    let failing = vm.exec("echo out; echo err >&2; exit 3", Duration::from_secs(10))?;
    if (failing.code, failing.text.as_str()) != (3, "out\nerr\n") {
        bail!("a command ended in a wrong way: {failing:?}");
    }
    // Two commands at a time, one of which is killed together with all its children.
    let endless = vm.spawn("echo started; sleep 1000 & sleep 1000")?;
    endless.wait_for_output("started", Duration::from_secs(10))?;
    vm.run("pgrep -x sleep")?;
    endless.kill()?;
    let killed = endless.wait(Duration::from_secs(10))?;
    vm.wait_until("! pgrep -x sleep", Duration::from_secs(10))?;
    if killed.code != 128 + 9 {
        bail!("a killed command ended in a wrong way: {killed:?}");
    }
    Ok(String::new())
}
