//! The network function of the daemon with the kernel's own driver: two guests without any other network interface. All
//! cases share the two.

mod cards;
mod life;
mod settings;
mod stations;
mod traffic;

use anyhow::{Result, bail, ensure};

use super::case::Case;
use super::shared::Shared;
use cards::Cards;

/// All cases of the group.
pub(crate) fn cases() -> Vec<Case> {
    let cards = Shared::new(Cards::boot);
    let mut cases = traffic::cases(&cards);
    cases.extend(settings::cases(&cards));
    cases.extend(stations::cases(&cards));
    cases.extend(life::cases(&cards));
    cases.push(cards.case("nic/nothing-refused", nothing_refused));
    cases
}

/// Counters of the vNIC for malformed frames, rings and commands.
const REFUSED: [&str; 3] = ["vmxnet3_send_errors", "vmxnet3_queue_errors", "vmxnet3_command_errors"];
/// Counters of the network for frames that it refuses. Full queues are not among them, because many streams may fill a
/// queue.
const REFUSED_BY_NETWORK: [&str; 4] =
    ["passed_dropped_roce", "passed_dropped_address", "passed_dropped_vlan", "switch_dropped_too_long"];

/// The cases above have not increased any of the error counters.
fn nothing_refused(cards: &Cards) -> Result<String> {
    let mut frames = 0;
    for end in [0, 1] {
        let device = cards.device(end)?;
        let (card, network) = (&device["nic"]["counters"], &device["network"]["counters"]);
        for (names, counters) in [(&REFUSED[..], card), (&REFUSED_BY_NETWORK, network)] {
            for name in names {
                match counters[name].as_u64() {
                    Some(0) => {}
                    other => bail!("{}: {name} is {other:?}: {counters}", cards.vm(end).name()),
                }
            }
        }
        frames += card["vmxnet3_received_frames"].as_u64().unwrap_or(0);
    }
    ensure!(frames > 100_000, "only {frames} frames were received");
    Ok(format!("{frames} frames received"))
}
