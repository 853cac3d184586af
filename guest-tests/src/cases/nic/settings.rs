//! Settings of `ethtool`: the vNIC applies them and continues to work.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::super::case::Case;
use super::cards::{Both, CARD, Cards, QUEUES};

/// Amount that is enough for segments, acknowledgements and some interrupts.
const BYTES: u64 = 2 << 20;
/// Streams with random ports, and the size of each. The probability that one of four queues gets none of them is 10^-7.
const FLOWS: usize = 64;
const FLOW_BYTES: u64 = 64 << 10;

pub(super) fn cases(cards: &Both) -> Vec<Case> {
    vec![
        cards.case("nic/channels", channels),
        cards.case("nic/features", features),
        cards.case("nic/segmentation", segmentation),
        cards.case("nic/rings", rings),
        cards.case("nic/coalescing", coalescing),
        cards.case("nic/indirection", indirection),
    ]
}

/// There are as many queues as the guest has processors, each with its own interrupt, and each is used.
fn channels(cards: &Cards) -> Result<String> {
    cards.both_ways(FLOW_BYTES, FLOWS)?;
    for (end, queues) in QUEUES.into_iter().enumerate() {
        let vm = cards.vm(end);
        let text = vm.run(&format!("ethtool -l {CARD}"))?;
        let combined: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("Combined:")).map(str::trim).collect();
        let as_many = combined.iter().filter(|number| **number == queues.to_string()).count();
        ensure!(as_many == 2, "{}: not {queues} channels:\n{text}", vm.name());
        let text = vm.run(&format!("grep {CARD} /proc/interrupts"))?;
        let used = text
            .lines()
            .filter(|line| line.contains("rxtx"))
            .filter(|line| line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum::<u64>() > 0);
        ensure!(used.count() == usize::try_from(queues)?, "{}: not an interrupt for each:\n{text}", vm.name());
        let used = received(cards, end)?.into_iter().filter(|&packets| packets > 0).count();
        ensure!(used == usize::try_from(queues)?, "{}: {used} of {queues} queues are used", vm.name());
    }
    Ok(String::new())
}

/// Returns the number of unicast packets that each receive queue has received.
fn received(cards: &Cards, end: usize) -> Result<Vec<u64>> {
    let text = cards.vm(end).run(&format!("ethtool -S {CARD}"))?;
    let values = text.lines().filter_map(|line| line.trim().strip_prefix("ucast pkts rx:"));
    values.map(|value| value.trim().parse().with_context(|| format!("no number: {value}"))).collect()
}

/// Returns the changeable features with their states.
fn changeable(cards: &Cards, end: usize) -> Result<BTreeMap<String, bool>> {
    let text = cards.vm(end).run(&format!("ethtool -k {CARD}"))?;
    let states = text.lines().filter_map(|line| line.trim().split_once(": ")).filter_map(|(name, state)| match state {
        "on" => Some((name.to_owned(), true)),
        "off" => Some((name.to_owned(), false)),
        // Fixed, or requested but not possible.
        _ => None,
    });
    Ok(states.collect())
}

/// Toggles each feature. It takes the requested state, and bytes still arrive intact in both directions.
fn features(cards: &Cards) -> Result<String> {
    let before = changeable(cards, 0)?;
    let of_card = ["rx-checksumming", "tcp-segmentation-offload", "large-receive-offload", "rx-vlan-offload"];
    for name in of_card.into_iter().chain(["scatter-gather", "generic-receive-offload", "tx-vlan-offload"]) {
        ensure!(before.contains_key(name), "{name} cannot be changed: {before:?}");
    }
    for (name, &on) in &before {
        let set = |on: bool| {
            let word = if on { "on" } else { "off" };
            cards.vm(0).run(&format!("ethtool -K {CARD} {name} {word} 2>&1"))
        };
        set(!on).with_context(|| format!("feature {name}"))?;
        let now = changeable(cards, 0)?.get(name).copied();
        ensure!(now == Some(!on), "{name} is {now:?} and was to be {}", !on);
        cards.both_ways(BYTES, 2).with_context(|| format!("with {name} {}", if on { "off" } else { "on" }))?;
        set(on)?;
    }
    // A feature that depends on others is not restored with them, so each is restored explicitly.
    for (name, on) in &before {
        let word = if *on { "on" } else { "off" };
        cards.vm(0).run(&format!("ethtool -K {CARD} {name} {word} 2>&1"))?;
    }
    let after = changeable(cards, 0)?;
    ensure!(after == before, "the features were {before:?} and are {after:?}");
    Ok(format!("{} features", before.len()))
}

/// The vNIC segments packets if the driver may offload this, and only then.
fn segmentation(cards: &Cards) -> Result<String> {
    let [_, b] = cards.addresses()?;
    let segments = |on: &str| -> Result<u64> {
        cards.vm(0).run(&format!("ethtool -K {CARD} tso {on}"))?;
        let before = cards.statistic(0, "TSO pkts tx")?;
        cards.stream(1, &b.to_string(), 8 << 20, 1)?;
        Ok(cards.statistic(0, "TSO pkts tx")? - before)
    };
    let (off, on) = (segments("off")?, segments("on")?);
    ensure!(off == 0 && on > 1000, "{off} segments without, {on} with segmentation offload");
    Ok(format!("{on} segments"))
}

/// Returns the current settings of `ethtool -g`.
fn ring_sizes(cards: &Cards, end: usize) -> Result<BTreeMap<String, String>> {
    let text = cards.vm(end).run(&format!("ethtool -g {CARD}"))?;
    let (_, current) = text.split_once("Current hardware settings:").context("no current settings")?;
    let lines = current.lines().filter_map(|line| line.split_once(':'));
    Ok(lines.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect())
}

fn rings(cards: &Cards) -> Result<String> {
    for end in [1, 0] {
        let vm = cards.vm(end);
        let before = ring_sizes(cards, end)?;
        let set = |rx: &str, jumbo: &str, tx: &str| {
            vm.run(&format!("ethtool -G {CARD} rx {rx} rx-jumbo {jumbo} tx {tx} 2>&1"))
        };
        for (rx, jumbo, tx) in [("32", "32", "32"), ("96", "64", "160"), ("4096", "2048", "4096")] {
            set(rx, jumbo, tx)?;
            let now = ring_sizes(cards, end)?;
            let as_asked = [("RX", rx), ("RX Jumbo", jumbo), ("TX", tx)]
                .into_iter()
                .all(|(name, size)| now.get(name).is_some_and(|now| now == size));
            ensure!(as_asked, "asked for {rx}, {jumbo}, {tx}: {now:?}");
            cards.both_ways(BYTES, 4).with_context(|| format!("with rings of {rx}, {jumbo} and {tx}"))?;
        }
        let of = |name: &str| before.get(name).cloned().with_context(|| format!("no {name} in {before:?}"));
        set(&of("RX")?, &of("RX Jumbo")?, &of("TX")?)?;
        let after = ring_sizes(cards, end)?;
        ensure!(after == before, "the rings were {before:?} and are {after:?}");
    }
    Ok(String::new())
}

/// With every kind of interrupt moderation, no packet is held back forever.
fn coalescing(cards: &Cards) -> Result<String> {
    let [_, b] = cards.addresses()?;
    let shown = |name: &str| -> Result<String> {
        let text = cards.vm(1).run(&format!("ethtool -c {CARD}"))?;
        let found = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        Ok(found.with_context(|| format!("no {name} in {text}"))?.trim().to_owned())
    };
    for (setting, name, value) in [
        ("adaptive-rx on", "Adaptive RX", "on"),
        ("adaptive-rx off rx-usecs 500", "rx-usecs", "500"),
        ("rx-usecs 0 rx-frames 64 tx-frames 32", "rx-frames", "64"),
        ("rx-frames 0 tx-frames 0", "rx-frames", "0"),
    ] {
        cards.vm(1).run(&format!("ethtool -C {CARD} {setting} 2>&1"))?;
        let now = shown(name)?;
        ensure!(now.starts_with(value), "{setting}: {name} is {now}");
        cards.both_ways(BYTES, 4).with_context(|| setting.to_owned())?;
        // One packet at a time, so that no later packet triggers the interrupt.
        let text = cards.vm(0).run(&format!("ping -n -q -c 20 -i 0.01 -W 20 {b}"))?;
        if !text.contains(" 0% packet loss") {
            bail!("{setting}: {text}");
        }
    }
    Ok(String::new())
}

/// Packets go to the queues that the indirection table names.
fn indirection(cards: &Cards) -> Result<String> {
    let [a, _] = cards.addresses()?;
    let packets = |weights: &str| -> Result<Vec<u64>> {
        cards.vm(0).run(&format!("ethtool -X {CARD} {weights} 2>&1"))?;
        let before = received(cards, 0)?;
        cards.stream(0, &a.to_string(), FLOW_BYTES, FLOWS)?;
        let after = received(cards, 0)?;
        Ok(after.into_iter().zip(before).map(|(after, before)| after - before).collect())
    };
    let one = packets("weight 0 0 1 0")?;
    // The device computes no hash for ARP, and the stack may probe a neighbour with it at any time. Queue 0 receives
    // those few packets.
    ensure!(one.len() == 4 && one[2] > 100 && one[0] < 10 && [one[1], one[3]] == [0; 2], "queue 2 alone: {one:?}");
    let all = packets("equal 4")?;
    ensure!(all.iter().all(|&packets| packets > 0), "all queues: {all:?}");
    Ok(String::new())
}
