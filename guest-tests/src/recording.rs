//! Adjusts the recording of `demo` for the README, as svg-term writes it: a strip of frames that CSS moves in steps.

use std::path::Path;

use anyhow::{Context, Result};

/// Seconds for which the last frame is shown.
const HOLD: f64 = 5.0;

/// Makes the last frame of a picture stay before the animation restarts, and writes that frame as a still picture to
/// `result`.
pub(crate) fn hold_last_frame(path: &Path, result: &Path) -> Result<()> {
    let picture = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let unknown = || format!("{} is no recording by svg-term", path.display());
    let held = held(&picture).with_context(unknown)?;
    let still = still(&held).with_context(unknown)?;
    std::fs::write(path, held).with_context(|| format!("cannot write {}", path.display()))?;
    std::fs::write(result, still).with_context(|| format!("cannot write {}", result.display()))
}

/// The frames of an animation.
struct Animation<'a> {
    /// Start of each frame in seconds, and the style that brings it into view.
    frames: Vec<(f64, &'a str)>,
    seconds: f64,
}

/// The text before the frames, between them and their duration, and after that.
type Around<'a> = [&'a str; 3];

fn parse(picture: &str) -> Option<(Animation<'_>, Around<'_>)> {
    let (before, rest) = picture.split_once("@keyframes h{")?;
    let (frames, rest) = rest.split_once("}}")?;
    let (between, rest) = rest.split_once("animation-duration:")?;
    let (seconds, after) = rest.split_once("s;")?;
    let seconds: f64 = seconds.parse().ok()?;
    let frame = |text: &'_ str| -> Option<(f64, usize)> {
        let (when, how) = text.split_once('{')?;
        let share = if when == "to" { 100.0 } else { when.strip_suffix('%')?.parse().ok()? };
        Some((share / 100.0 * seconds, text.len() - how.len()))
    };
    let frames = frames.split('}').map(|text| frame(text).map(|(at, how)| (at, text.get(how..).unwrap_or_default())));
    Some((Animation { frames: frames.collect::<Option<_>>()?, seconds }, [before, between, after]))
}

/// Returns the time for which the last frame is shown. The keyframe at the very end is the start of the next round.
fn last_is_seen(animation: &Animation<'_>) -> Option<f64> {
    let (_, last) = animation.frames.last()?;
    let since = animation.frames.iter().find(|(_, how)| how == last)?.0;
    Some(animation.seconds - since)
}

fn held(picture: &str) -> Option<String> {
    let (animation, [before, between, after]) = parse(picture)?;
    let (_, last) = *animation.frames.last()?;
    if last_is_seen(&animation)? > 0.0 {
        return Some(picture.to_owned());
    }
    let seconds = animation.seconds + HOLD;
    let frames: String =
        animation.frames.iter().map(|(at, how)| format!("{:.1}%{{{how}}}", at / seconds * 100.0)).collect();
    // Without an animation, as in a preview, the style of the strip itself applies.
    Some(format!("{before}@keyframes h{{{frames}to{{{last}}}}}{between}{last};animation-duration:{seconds}s;{after}"))
}

/// Returns the last frame of a picture whose last frame stays. Without keyframes the style of the strip applies.
fn still(held: &str) -> Option<String> {
    let (_, [before, between, after]) = parse(held)?;
    Some(format!("{before}{between}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of svg-term: the last frame has no time.
    const WRITTEN: &str = "<style>@keyframes h{0%{transform:translateX(-10px)}50%{transform:translateX(-20px)}\
        to{transform:translateX(-30px)}}</style><g style=\"animation-duration:5s;animation-name:h\">";

    #[test]
    fn the_last_frame_stays() {
        assert_eq!(last_is_seen(&parse(WRITTEN).unwrap().0), Some(0.0));
        let held = held(WRITTEN).unwrap();
        assert_eq!(
            held,
            "<style>@keyframes h{0.0%{transform:translateX(-10px)}25.0%{transform:translateX(-20px)}\
             50.0%{transform:translateX(-30px)}to{transform:translateX(-30px)}}</style>\
             <g style=\"transform:translateX(-30px);animation-duration:10s;animation-name:h\">"
        );
        assert_eq!(super::held(&held).as_ref(), Some(&held), "once");
        assert!(super::held("<svg/>").is_none());
        assert_eq!(still(&held).unwrap(), "<style></style><g style=\"transform:translateX(-30px);animation-name:h\">");
    }

    /// `guest-tests/recording/record` creates the picture.
    #[test]
    fn the_readme_shows_the_last_frame_long_enough_to_be_read() {
        let docs = crate::daemon::workspace_manifest().unwrap().with_file_name("docs");
        let picture = std::fs::read_to_string(docs.join("demo.svg")).unwrap();
        let (animation, [_, between, _]) = parse(&picture).unwrap();
        assert!(last_is_seen(&animation).unwrap() >= HOLD - 0.1);
        assert!(
            between.ends_with(&format!("\"{};", animation.frames.last().unwrap().1)),
            "a preview shows an empty box"
        );
        let result = std::fs::read_to_string(docs.join("demo-result.svg")).unwrap();
        assert!(still(&picture).unwrap() == result, "docs/demo-result.svg is not the last frame of docs/demo.svg");
    }
}
