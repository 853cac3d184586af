//! The dumbbell network: hosts with an interface each, a switch with one line to the receiver, and a delay on that
//! line.
//!
//! It consists of four namespaces with a bridge or interfaces each: `senders`, `switch`, `cable`, `receiver`. Frames
//! leave the switch by `out`, whose queue is the bottleneck and marks packets. The cable delays frames by 5 ms in each
//! direction.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::super::session::Talker;

/// MTU of all interfaces.
pub(super) const MTU: u32 = 1500;
/// Number of hosts that can send.
pub(super) const HOSTS: usize = 16;
/// The addresses of the two kernels' own network stacks, for TCP.
pub(super) const KERNELS: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

/// Bits per second of the bottleneck.
pub(super) const RATE: f64 = 100e6;
/// Queued bytes from which on it marks.
pub(super) const MARK: f64 = 60_000.0;

/// Returns a shell script that creates the network.
pub(super) fn script() -> String {
    let mut script = format!(
        "set -e
         modprobe -a veth bridge sch_tbf sch_red sch_netem sch_prio cls_u32
         for name in senders switch cable receiver; do
             ip netns add $name
             ip netns exec $name sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
             ip -n $name link set lo up
         done
         for name in senders receiver; do ip netns exec $name sysctl -qw net.ipv4.tcp_ecn=1; done
         for name in switch cable; do
             ip -n $name link add bridge type bridge
             ip -n $name link set bridge up
         done
         connect() {{
             ip -n $1 link add $2 mtu {MTU} type veth peer name $4 mtu {MTU} netns $3
             for end in \"$1 $2\" \"$3 $4\"; do
                 set -- $end
                 case $1 in
                     switch|cable) ip -n $1 link set $2 master bridge up;;
                     # Marks are for packets, so there are no super-frames.
                     *) ip -n $1 link set $2 gso_max_size {} gso_max_segs 1 up;;
                 esac
             done
         }}
         connect switch out cable in
         connect cable far receiver wire
         connect senders kernel switch port-kernel
         ip -n senders address add {}/24 dev kernel
         ip -n receiver address add {}/24 dev wire\n",
        MTU + 100,
        KERNELS[0],
        KERNELS[1],
    );
    for host in 0..HOSTS {
        let _ = writeln!(script, "connect senders {} switch port{host}", interface(host));
    }
    // A port forwards once the kernel has noticed its carrier, up to a second later. Earlier packets are lost and not
    // counted.
    script.push_str(
        "for name in switch cable; do
             while bridge -n $name link | grep -q 'state disabled'; do sleep 0.1; done
         done",
    );
    script
}

/// Returns the interface of a sending host.
pub(super) fn interface(host: usize) -> String {
    format!("wire{host}")
}

/// Returns a shell script that recreates all queues. `lost` of 100 notifications are lost.
///
/// RED's average follows the queue immediately (weight 1/2, the maximum), and from its threshold on it marks
/// everything, as a switch does for DCQCN. Packets that cannot be marked pass.
pub(super) fn queues(lost: u32) -> String {
    const LONG: &str = "netem delay 5ms limit 100000";
    let notifications = format!(
        "tc -n cable qdisc add dev in root handle 1: prio bands 2 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
         tc -n cable qdisc add dev in parent 1:1 {LONG}
         tc -n cable qdisc add dev in parent 1:2 {LONG} loss {lost}%
         tc -n cable filter add dev in parent 1: protocol ip prio 1 u32 \
             match ip protocol 17 0xff match u16 4791 0xffff at 22 match u8 0x81 0xff at 28 flowid 1:2"
    );
    let back = if lost > 0 { notifications } else { format!("tc -n cable qdisc add dev in root {LONG}") };
    format!(
        "set -e
         for dev in 'switch dev out' 'cable dev in' 'cable dev far'; do
             tc -n ${{dev%% *}} qdisc del ${{dev#* }} root 2>/dev/null || true
         done
         tc -n switch qdisc add dev out root handle 1: tbf rate 100mbit burst 16kb limit 16mb
         tc -n switch qdisc add dev out parent 1:1 handle 10: red limit 16777216 min 60000 max 61000 avpkt 1000 \
             burst 61 bandwidth 100mbit ecn nodrop
         tc -n cable qdisc add dev far root {LONG}
         {back}"
    )
}

/// State of the bottleneck's queue at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    /// Queued bytes.
    pub(super) backlog: u64,
    /// Bytes sent, packets marked and packets dropped since the queue was created.
    pub(super) bytes: u64,
    pub(super) marked: u64,
    pub(super) dropped: u64,
}

/// Queries `tc` repeatedly in one process, which avoids a new process for each query.
#[derive(Debug)]
pub(super) struct Watch(Talker);

impl Watch {
    pub(super) fn new() -> Result<Self> {
        let words = ["stdbuf", "-oL", "tc", "-n", "switch", "-s", "-j", "-b", "-"];
        Ok(Self(Talker::spawn(&words.map(str::to_owned))?))
    }

    pub(super) fn look(&mut self) -> Result<Queue> {
        self.0.tell("qdisc show dev out")?;
        let line = self.0.line()?;
        Queue::parse(&line).with_context(|| format!("the output of tc: {line}"))
    }
}

#[derive(Debug, Deserialize)]
struct Qdisc {
    kind: String,
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    drops: u64,
    #[serde(default)]
    backlog: u64,
    #[serde(default)]
    marked: u64,
}

impl Queue {
    fn parse(line: &str) -> Result<Self> {
        let all: Vec<Qdisc> = serde_json::from_str(line)?;
        let of = |kind: &str| all.iter().find(|it| it.kind == kind).with_context(|| format!("there is no {kind}"));
        let (rate, queue) = (of("tbf")?, of("red")?);
        Ok(Self { backlog: queue.backlog, bytes: rate.bytes, marked: queue.marked, dropped: rate.drops + queue.drops })
    }
}
