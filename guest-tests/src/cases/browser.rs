//! The page of `bench` and the pictures of the documents in a real browser, installed in a root directory of its own.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::case::{Case, skip};
use crate::bench;
use crate::image::{GuestImage, HostRoot};

const PACKAGES: [&str; 2] = ["chromium", "fonts-dejavu-core"];

/// The tests.
pub(crate) fn cases() -> Vec<Case> {
    const WHEN: &str = "installs a browser; runs when asked for: --only slow/browser";
    let case = |name: &str, run: fn(&GuestImage) -> Result<String>| Case::alone(name, run).slow(WHEN);
    vec![case("slow/browser", browser), case("slow/browser-pictures", pictures)]
}

/// Each picture and table has its place on the page, nothing exceeds the edge, and a screenshot is not empty.
fn browser(image: &GuestImage) -> Result<String> {
    let root = installed(image)?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let page = bench::example_page()?;
    let parts: Vec<_> = bench::parts().collect();
    let script = format!("<script>for (const id of {parts:?}) {MEASURE}</script></body>");
    let measured = page.replacen("</body>", &script, 1);
    fs::write(directory.path().join("report.html"), measured).context("cannot write a page")?;
    let shown = browse(&root, directory.path(), "report.html", "--dump-dom")?;
    for id in parts {
        let said = shown.split(&format!("data-{id}=\"")).nth(1).and_then(|rest| rest.split('"').next());
        let said = said.with_context(|| format!("no size of {id}: {shown}"))?;
        let sizes: Vec<f64> = said.split(' ').map(str::parse).collect::<Result<_, _>>().context(said.to_owned())?;
        let [left, right, height] = sizes[..] else { anyhow::bail!("{id}: {said}") };
        let is_shown = left >= 0.0 && right <= WIDTH && right - left > WIDTH / 2.0 && height > 30.0;
        ensure!(is_shown, "{id} is from {left} to {right} of {WIDTH}, {height} high");
    }
    ensure!(shown.contains("small &amp; &lt;quick&gt;"), "a title is not as it was written: {shown}");
    let picture = photograph(&root, directory.path(), "report.html")?.len();
    Ok(format!("a photograph of {picture} bytes"))
}

/// Builds a root directory with a browser.
fn installed(image: &GuestImage) -> Result<HostRoot> {
    if !rustix::process::geteuid().is_root() {
        return Err(skip("a browser in a root directory of its own needs root"));
    }
    HostRoot::build(image, "browser", &PACKAGES)
}

/// Texts of the chart are within it and do not cover each other. The recording ends with the picture of its result.
fn pictures(image: &GuestImage) -> Result<String> {
    let root = installed(image)?;
    let directory = tempfile::Builder::new().prefix("guest-tests-").tempdir().context("cannot create a directory")?;
    let page = |name: &str, picture: &str, script: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(picture);
        let picture = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let picture = picture.find("<svg").and_then(|start| picture.get(start..)).context("no picture")?;
        let text = format!("<!DOCTYPE html><meta charset=utf-8><body>{picture}<script>{script}</script></body>");
        fs::write(directory.path().join(name), text).context("cannot write a page")
    };
    page("chart.html", "bandwidth.svg", MEASURE_TEXTS)?;
    let shown = browse(&root, directory.path(), "chart.html", "--dump-dom")?;
    let said = attribute(&shown, "data-texts")?;
    let numbers: Vec<u32> = said.split(' ').map(str::parse).collect::<Result<_, _>>().context(said.to_owned())?;
    let [texts, outside, covered] = numbers[..] else { anyhow::bail!("{said}") };
    ensure!(texts > 10 && outside == 0 && covered == 0, "{texts} texts: {outside} outside, {covered} over another");
    photograph(&root, directory.path(), "chart.html")?;

    page("recording.html", "demo.svg", LAST_MOMENT)?;
    page("result.html", "demo-result.svg", LAST_MOMENT)?;
    let place = |page: &str| -> Result<String> {
        photograph(&root, directory.path(), page)?;
        Ok(attribute(&browse(&root, directory.path(), page, "--dump-dom")?, "data-strip")?.to_owned())
    };
    let (last, result) = (place("recording.html")?, place("result.html")?);
    ensure!(last == result, "the recording ends at {last}, docs/demo-result.svg is at {result}");
    Ok(format!("{texts} texts in the chart"))
}

/// Script that counts the texts of a picture: all, those outside of it, and pairs that overlap.
const MEASURE_TEXTS: &str = "
    const box = document.querySelector('svg').getBoundingClientRect();
    const all = [...document.querySelectorAll('text')].map(text => text.getBoundingClientRect());
    const outside = all.filter(it => it.left < box.left || it.right > box.right || it.top < box.top
        || it.bottom > box.bottom);
    const covers = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    const pairs = all.flatMap((a, at) => all.slice(at + 1).filter(b => covers(a, b)));
    document.body.setAttribute('data-texts', [all.length, outside.length, pairs.length].join(' '));";

/// Script that stops an animation at its last moment, and reports the place of its strip of frames.
const LAST_MOMENT: &str = "
    for (const animation of document.getAnimations()) {
        animation.pause();
        animation.currentTime = animation.effect.getComputedTiming().duration - 1;
    }
    const strip = document.querySelector('[style*=translateX]');
    document.body.setAttribute('data-strip', getComputedStyle(strip).transform);";

/// Returns an attribute that a script has set.
fn attribute<'a>(shown: &'a str, name: &str) -> Result<&'a str> {
    let said = shown.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
    said.with_context(|| format!("no {name}: {shown}"))
}

/// Returns a screenshot of a page in `folder`.
fn photograph(root: &HostRoot, folder: &Path, page: &str) -> Result<Vec<u8>> {
    let name = Path::new(page).with_extension("png");
    browse(root, folder, page, &format!("--screenshot=/mnt/{}", name.display()))?;
    let picture = fs::read(folder.join(name)).context("no photograph")?;
    ensure!(picture.len() > 10_000, "the photograph of {page} has {} bytes", picture.len());
    Ok(picture)
}

/// Width of the window.
const WIDTH: f64 = 1000.0;

/// Script by which the page itself reports the position of a part.
const MEASURE: &str = "{
    const part = document.getElementById(id), box = (part.querySelector(':scope > svg') || part).getBoundingClientRect();
    document.body.setAttribute('data-' + id, [box.left, box.right, box.height].join(' '));
}";

/// Returns the browser's output for a page in `folder`, which it sees as `/mnt`.
fn browse(root: &HostRoot, folder: &Path, page: &str, what: &str) -> Result<String> {
    let script = format!(
        "mount -t proc proc \"$0/proc\"; mount --rbind /dev \"$0/dev\"; mount --bind \"$1\" \"$0/mnt\"
         mount -t tmpfs tmpfs \"$0/tmp\"
         exec chroot \"$0\" chromium --headless=new --no-sandbox --disable-gpu --user-data-dir=/tmp/profile \\
             --window-size={WIDTH},2000 {what} file:///mnt/{page}"
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
