//! Receive filters of a vNIC: VLANs, multicast, promiscuous mode, MTU.

use anyhow::{Context, Result, ensure};

use super::super::case::Case;
use super::cards::{Both, CARD, Cards, MTU, PATIENCE};

pub(super) fn cases(cards: &Both) -> Vec<Case> {
    vec![
        cards.case("nic/vlans", vlans),
        cards.case("nic/two-vlan-tags", two_vlan_tags),
        cards.case("nic/multicast", multicast),
        cards.case("nic/promiscuous", promiscuous),
        cards.case("nic/all-multicast", all_multicast),
        cards.case("nic/own-address", own_address),
        cards.case("nic/mtu-9000", mtu_9000),
    ]
}

/// Returns the number of frames that the vNIC of guest b filtered while guest a ran a command. A ping afterwards shows
/// that all earlier frames have arrived.
fn filtered(cards: &Cards, command: &str) -> Result<u64> {
    let [_, b] = cards.addresses()?;
    let before = cards.counter(1, "vmxnet3_receive_filtered")?;
    // The exit code of the command is irrelevant.
    cards.vm(0).exec(command, PATIENCE)?;
    cards.vm(0).run(&format!("ping -n -q -c 1 -W 20 {b}"))?;
    Ok(cards.counter(1, "vmxnet3_receive_filtered")? - before)
}

/// Returns a command that sends a packet which must not be answered.
fn unanswered(address: &str) -> String {
    format!("ping -n -q -c 1 -W 0.1 {address}")
}

/// Two VLANs beside the untagged network, with tags that the vNIC inserts and strips, and with tags that it passes.
fn vlans(cards: &Cards) -> Result<String> {
    let add = |end: usize, vlan: u16| {
        let address = format!("10.1.{vlan}.{}", end + 1);
        cards.vm(end).run(&format!(
            "modprobe 8021q && ip link add link {CARD} name {CARD}.{vlan} type vlan id {vlan} &&
             ip link set {CARD}.{vlan} up && ip address add {address}/24 dev {CARD}.{vlan}"
        ))
    };
    for end in [0, 1] {
        add(end, 7)?;
    }
    add(0, 99)?;
    let work = || -> Result<()> {
        for offload in ["on", "off"] {
            for vm in [cards.vm(0), cards.vm(1)] {
                vm.run(&format!("ethtool -K {CARD} rxvlan {offload} txvlan {offload}"))?;
            }
            for (end, address) in ["10.1.7.1", "10.1.7.2"].into_iter().enumerate() {
                cards.stream(end, address, 8 << 20, 4).with_context(|| format!("VLAN 7, offloads {offload}"))?;
            }
        }
        Ok(())
    };
    let result = work();
    for vm in [cards.vm(0), cards.vm(1)] {
        vm.run(&format!("ethtool -K {CARD} rxvlan on txvlan on"))?;
    }
    result?;
    // Guest b joins VLAN 99 only later.
    let kept_out = filtered(cards, &unanswered("10.1.99.2"))?;
    ensure!(kept_out > 0, "the vNIC let a frame of another VLAN through");
    add(1, 99)?;
    cards.vm(0).run("ping -n -q -c 3 -i 0.01 -W 20 10.1.99.2")?;
    for vm in [cards.vm(0), cards.vm(1)] {
        vm.run(&format!("ip link del {CARD}.7 && ip link del {CARD}.99"))?;
    }
    ensure!(filtered(cards, "true")? == 0, "frames of the untagged network were filtered");
    Ok(String::new())
}

/// TCP behind two VLAN tags, of which the vNIC strips one or none. Older drivers crash on such a frame if the vNIC
/// reports it as TCP.
fn two_vlan_tags(cards: &Cards) -> Result<String> {
    const ADDRESSES: [&str; 2] = ["10.1.79.1", "10.1.79.2"];
    let work = || -> Result<()> {
        for (end, address) in ADDRESSES.into_iter().enumerate() {
            cards.vm(end).run(&format!(
                "modprobe 8021q && ip link add link {CARD} name outer type vlan id 7 && ip link set outer up &&
                 ip link add link outer name inner type vlan id 9 && ip link set inner up &&
                 ip address add {address}/24 dev inner"
            ))?;
        }
        for offload in ["on", "off"] {
            for vm in [cards.vm(0), cards.vm(1)] {
                vm.run(&format!("ethtool -K {CARD} rxvlan {offload} txvlan {offload}"))?;
            }
            for (end, address) in ADDRESSES.into_iter().enumerate() {
                cards.stream(end, address, 2 << 20, 2).with_context(|| format!("offloads {offload}"))?;
            }
        }
        Ok(())
    };
    let result = work();
    for vm in [cards.vm(0), cards.vm(1)] {
        vm.run(&format!("ethtool -K {CARD} rxvlan on txvlan on; ip link del outer"))?;
    }
    result.map(|()| String::new())
}

/// A multicast group is received while a socket of the guest is a member.
fn multicast(cards: &Cards) -> Result<String> {
    let group = "239.7.7.7";
    cards.vm(0).run(&format!("ip route replace {group}/32 dev {CARD}"))?;
    ensure!(
        filtered(cards, &unanswered(group))? > 0,
        "the vNIC passed frames of a group that the guest has not joined"
    );
    // This makes the kernel join the group.
    cards.vm(1).run(&format!("ip address add {group}/32 dev {CARD} autojoin"))?;
    ensure!(filtered(cards, &unanswered(group))? == 0, "the vNIC did not take frames of a group that it was asked for");
    // The all-hosts group, which every host has joined. Without -L the pinging guest answers itself, and first.
    let text = cards.vm(0).run(&format!("ping -n -L -c 3 -i 0.01 -W 20 -I {CARD} 224.0.0.1"))?;
    let [a, b] = cards.addresses()?;
    ensure!(text.contains(&format!("from {b}")), "guest b ({b}) did not answer {a}:\n{text}");
    cards.vm(1).run(&format!("ip address del {group}/32 dev {CARD}"))?;
    ensure!(filtered(cards, &unanswered(group))? > 0, "the vNIC goes on taking frames of the group");
    cards.vm(0).run(&format!("ip route del {group}/32 dev {CARD}"))?;
    Ok(String::new())
}

/// Frames to another MAC address: only a vNIC in promiscuous mode receives them.
fn promiscuous(cards: &Cards) -> Result<String> {
    let stranger = "192.168.77.99";
    cards.vm(0).run(&format!("ip neigh replace {stranger} lladdr 52:54:00:00:99:99 dev {CARD} nud permanent"))?;
    ensure!(filtered(cards, &unanswered(stranger))? > 0, "the vNIC took a frame that is for another station");
    let heard = heard(cards, "", &format!("dst host {stranger} and icmp"), &unanswered(stranger))?;
    ensure!(heard == 0, "the vNIC that takes everything kept {heard} frames out");
    ensure!(filtered(cards, &unanswered(stranger))? > 0, "the vNIC goes on taking everything");
    cards.vm(0).run(&format!("ip neigh del {stranger} dev {CARD}"))?;
    Ok(String::new())
}

/// Waits in guest b with `tcpdump` for a frame, which guest a causes by running `command` repeatedly. Returns the
/// number of frames that the vNIC filtered meanwhile.
fn heard(cards: &Cards, options: &str, filter: &str, command: &str) -> Result<u64> {
    let dump = cards.vm(1).spawn(&format!("tcpdump -l -n {options} -c 1 -i {CARD} {filter} 2>&1"))?;
    dump.wait_for_output("listening on", PATIENCE)?;
    let kept_out = filtered(cards, command)?;
    let text = dump.wait_success(PATIENCE)?;
    ensure!(text.contains("1 packet captured"), "{text}");
    Ok(kept_out)
}

fn all_multicast(cards: &Cards) -> Result<String> {
    let group = "239.8.8.8";
    cards.vm(0).run(&format!("ip route replace {group}/32 dev {CARD}"))?;
    cards.vm(1).run(&format!("ip link set {CARD} allmulticast on"))?;
    let kept_out = heard(cards, "-p", &format!("dst host {group}"), &unanswered(group))?;
    cards.vm(1).run(&format!("ip link set {CARD} allmulticast off"))?;
    ensure!(kept_out == 0, "the vNIC that takes all groups kept {kept_out} frames out");
    ensure!(filtered(cards, &unanswered(group))? > 0, "the vNIC goes on taking all groups");
    cards.vm(0).run(&format!("ip route del {group}/32 dev {CARD}"))?;
    Ok(String::new())
}

/// The guest changes the address of its vNIC, and then restores it.
fn own_address(cards: &Cards) -> Result<String> {
    let [a, _] = cards.addresses()?;
    let set = |mac: &str| cards.vm(1).run(&format!("ip link set {CARD} address {mac}"));
    let ping = || cards.vm(1).run(&format!("ip neigh flush dev {CARD}; ping -n -q -c 3 -i 0.01 -W 20 {a}"));
    let own = cards.vm(1).run(&format!("cat /sys/class/net/{CARD}/address"))?;
    set("52:54:00:00:77:77")?;
    ensure!(cards.device(1)?["nic"]["mac"] == "52:54:00:00:77:77", "the vNIC has its old address");
    ping()?;
    set(own.trim())?;
    ping()?;
    Ok(String::new())
}

/// Long frames, which a vNIC with a smaller MTU does not receive.
fn mtu_9000(cards: &Cards) -> Result<String> {
    let [a, b] = cards.addresses()?;
    let longest = format!("ping -n -q -c 3 -i 0.01 -W 20 -M do -s 8972 {b}");
    cards.set_mtu(9000)?;
    let work = || -> Result<()> {
        cards.vm(0).run(&longest)?;
        cards.vm(1).run(&format!("ping -n -q -c 3 -i 0.01 -W 20 -M do -s 8972 {a}"))?;
        ensure!(cards.vm(0).exec(&longest.replace("8972", "8973"), PATIENCE)?.code != 0, "longer than the MTU");
        cards.both_ways(32 << 20, 4)?;
        // Segments of that size, and datagrams that take several packets.
        let _server = cards.serve(1)?;
        let command = format!("{} datagrams {b}:{} --from 8900 --to 9100", super::cards::PEER, super::cards::PORT);
        cards.vm(0).spawn(&command)?.wait_success(PATIENCE)?;
        cards.vm(1).run(&format!("ip link set {CARD} mtu {MTU}"))?;
        let kept_out = filtered(cards, &format!("ping -n -q -c 1 -W 0.1 -M do -s 8972 {b}"))?;
        ensure!(kept_out > 0, "the vNIC took a frame that is longer than its MTU");
        Ok(())
    };
    let result = work();
    cards.set_mtu(MTU)?;
    result?;
    cards.both_ways(2 << 20, 1)?;
    Ok(String::new())
}
