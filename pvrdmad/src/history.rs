//! Commands that print past events and failed queue pairs of a daemon.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::cli::EventsArgs;
use crate::control::{ask, start_events};
use crate::failures::Failures;
use crate::protocol::Request;
use crate::since::Since;
use crate::text::{printable, printable_text};

/// Asks a running daemon for the last failed queue pairs, of all devices or of one.
///
/// # Errors
/// No daemon answers, it refuses, or its answer is invalid.
pub fn ask_failures(path: &Path, device: Option<&str>, since: Option<Since>) -> Result<Failures> {
    let request = Request::Failures { device: device.map(str::to_owned), since: since.map(|Since(time)| time) };
    let (_, answer) = ask::<Box<RawValue>>(path, &request)?;
    let printed = printable(serde_json::from_str(answer.get())?);
    serde_json::from_value(printed).context("the failures are not understood")
}

/// The member of an event that tells its place among all events of the daemon.
#[derive(Deserialize)]
struct Numbered {
    number: u64,
}

/// Passes events of a running daemon to `print`, an object of JSON each: those that have happened, those that happen
/// from now on, or both without a gap.
///
/// # Errors
/// No daemon answers, it refuses, its answer is invalid, or `print` fails.
pub fn events(args: &EventsArgs, mut print: impl FnMut(String) -> Result<()>) -> Result<()> {
    let path = args.daemon.control()?;
    let is_past = args.since.is_some() || args.last.is_some();
    // The subscription precedes the question about the past, so that no event is missed between them.
    let coming = (args.follow || !is_past).then(|| start_events(&path)).transpose()?;
    let most = args.count.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
    let mut past = Vec::new();
    if is_past {
        let request = Request::PastEvents { since: args.since.map(|Since(time)| time), last: args.last };
        past = ask::<Vec<Box<RawValue>>>(&path, &request)?.1;
    }
    let number = |event: &str| serde_json::from_str::<Numbered>(event).map_or(0, |event| event.number);
    let seen = past.last().map_or(0, |event| number(event.get()));
    let past = past.iter().map(|event| Ok(printable_text(event.get())));
    let coming = coming.into_iter().flatten();
    let new = coming.filter(|event| event.as_ref().map_or(true, |event| seen == 0 || number(event) > seen));
    for event in past.chain(new).take(most) {
        print(event? + "\n")?;
    }
    Ok(())
}
