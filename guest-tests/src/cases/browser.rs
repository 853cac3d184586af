//! The page of `bench` in a real browser, which is installed in a root directory of its own.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use crate::bench;
use crate::image::{GuestImage, HostRoot};

const PACKAGES: [&str; 2] = ["chromium", "fonts-dejavu-core"];

/// The only test.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "installs a browser; runs when asked for: --only slow/browser";
    vec![Case::alone("slow/browser", browser).slow(WHEN)]
}

/// Each picture and table has its place on the page, nothing exceeds the edge, and a screenshot is not empty.
fn browser(image: &GuestImage) -> Result<String> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("a browser in a root directory of its own needs root"));
    }
    let root = HostRoot::build(image, "browser", &PACKAGES)?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let page = bench::example_page()?;
    let parts: Vec<_> = bench::parts().collect();
    let script = format!("<script>for (const id of {parts:?}) {MEASURE}</script></body>");
    let measured = page.replacen("</body>", &script, 1);
    fs::write(directory.path().join("report.html"), measured).context("cannot write a page")?;
    let shown = browse(&root, directory.path(), "--dump-dom")?;
    for id in parts {
        let said = shown.split(&format!("data-{id}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        let said = said.with_context(|| format!("no size of {id}: {shown}"))?;
        let sizes: Vec<f64> = said.split(' ').map(str::parse).collect::<Result<_, _>>().context(said.to_owned())?;
        let [left, right, height] = sizes[..] else { anyhow::bail!("{id}: {said}") };
        let is_shown = left >= 0.0 && right <= WIDTH && right - left > WIDTH / 2.0 && height > 30.0;
        ensure!(is_shown, "{id} is from {left} to {right} of {WIDTH}, {height} high");
    }
    ensure!(shown.contains("small &amp; &lt;quick&gt;"), "a title is not as it was written: {shown}");
    browse(&root, directory.path(), "--screenshot=/mnt/report.png")?;
    let picture = fs::metadata(directory.path().join("report.png")).context("no photograph")?.len();
    ensure!(picture > 10_000, "the photograph has {picture} bytes");
    Ok(format!("a photograph of {picture} bytes"))
}

/// Width of the window.
const WIDTH: f64 = 1000.0;

/// Script by which the page itself reports the position of a part.
const MEASURE: &str = "{
    const part = document.getElementById(id), box = (part.querySelector(':scope > svg') || part).getBoundingClientRect();
    document.body.setAttribute('data-' + id, [box.left, box.right, box.height].join(' '));
}";

/// Returns the browser's output for the page in `folder`, which it sees as `/mnt`.
fn browse(root: &HostRoot, folder: &Path, what: &str) -> Result<String> {
    let script = format!(
        "mount -t proc proc \"$0/proc\"; mount --rbind /dev \"$0/dev\"; mount --bind \"$1\" \"$0/mnt\"
         mount -t tmpfs tmpfs \"$0/tmp\"
         exec chroot \"$0\" chromium --headless=new --no-sandbox --disable-gpu --user-data-dir=/tmp/profile \\
             --window-size={WIDTH},2000 {what} file:///mnt/report.html"
    );
    let output = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "--net", "sh", "-ec", &script])
        .args([&root.path(""), folder])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/tmp")
        .stdin(Stdio::null())
        .output()
        .context("cannot run unshare")?;
    ensure!(output.status.success(), "chromium: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
