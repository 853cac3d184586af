//! Switches without threads, driven by hand; then with threads, while ports are added and removed.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

use super::mailbox::{CAPACITY, FRAME_COST};
use super::port::QUANTUM;
use super::*;
use crate::fault::{FaultLink, Faults};
use crate::memory::{self, MemoryLink};
use crate::offload::sample::{carried, data, long_tcp};
use crate::{Frames, GsoLink, ManualClock, Readiness};

const MTU: u32 = 1500;

fn mac(number: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, number])
}

const ALL: MacAddr = MacAddr([0xff; 6]);

/// Returns a frame of `length` bytes that contains a number.
fn frame(to: MacAddr, from: MacAddr, number: u32, length: usize) -> Vec<u8> {
    let mut frame = [&to.0[..], &from.0, &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(length.max(18), 0);
    frame
}

fn frames(list: &[Vec<u8>]) -> Frames {
    let mut frames = Frames::default();
    list.iter().for_each(|frame| frames.push(frame));
    frames
}

fn receive(link: &impl Link) -> Vec<Vec<u8>> {
    let (mut all, mut frames) = (Vec::new(), Frames::default());
    loop {
        frames.clear();
        link.receive(&mut frames, 64);
        if frames.is_empty() {
            return all;
        }
        all.extend(frames.iter().map(<[u8]>::to_vec));
    }
}

fn numbers(frames: &[Vec<u8>]) -> Vec<u32> {
    frames.iter().map(|frame| u32::from_be_bytes(*frame[14..].first_chunk().unwrap())).collect()
}

fn readable(link: &dyn Link) -> bool {
    let Readiness { readable, changed, .. } = link.readiness();
    let mut fds: Vec<_> =
        [&readable, &changed].into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

fn figure(link: &dyn Link, name: &str) -> u64 {
    link.counters().iter().find(|counter| counter.name == name).unwrap().value
}

/// Returns a switch that is driven by hand, and the other end of its uplink.
fn switch(capacity: usize) -> (Switch, MemoryLink, Arc<MemoryLink>) {
    let (ours, theirs) = memory::pair(capacity).unwrap();
    let ours = Arc::new(ours);
    let uplink = Arc::clone(&ours) as Arc<dyn Link>;
    (Switch::without_thread(Some(uplink), MTU, Arc::new(ManualClock::default())).unwrap(), theirs, ours)
}

fn plug<const N: usize>(switch: &Switch, numbers: [u8; N]) -> [Arc<SwitchPort>; N] {
    numbers.map(|number| switch.port(mac(number), UnknownUnicast::Drop).unwrap())
}

#[test]
fn a_sole_port_is_the_uplink() {
    let (switch, outside, uplink) = switch(100);
    outside.send(&frames(&[frame(mac(1), mac(9), 0, 60)]), 0);
    let [one] = plug(&switch, [1]);
    assert!(receive(&*one).is_empty(), "frames that arrive before the port exists are dropped");
    let (ours, theirs) = (one.readiness(), uplink.readiness());
    for (ours, theirs) in [(&ours.readable, &theirs.readable), (&ours.writable, &theirs.writable)] {
        assert!(
            Arc::ptr_eq(ours.as_ref().unwrap(), theirs.as_ref().unwrap()),
            "a single port uses the uplink's descriptor directly"
        );
    }
    let came = [1, 2, 255].map(|to| frame(if to == 255 { ALL } else { mac(to) }, mac(9), to.into(), 60));
    outside.send(&frames(&came), 0);
    outside.send(&frames(&[vec![2; 5], vec![]]), 0);
    assert!(!switch.service(), "a single port polls the uplink itself");
    assert_eq!(numbers(&receive(&*one)), [1, 255], "neither another one's frames nor halves of frames");
    assert_eq!(figure(&*one, "switch_dropped_unknown"), 3);
    // All its frames leave, whatever their destination.
    let sent = [mac(9), mac(1), ALL].map(|to| frame(to, mac(1), 5, 60));
    assert_eq!(one.send(&frames(&sent), 1), 2);
    assert_eq!(receive(&outside), sent[1..]);
    drop(one);
    // A bridge behind the port has hosts of its own.
    let bridge = switch.port(mac(1), UnknownUnicast::Flood).unwrap();
    outside.send(&frames(&came), 0);
    assert_eq!(numbers(&receive(&*bridge)), [1, 2, 255]);
}

/// Regression: an uplink peer that did not read stopped the frames between ports.
#[test]
fn an_uplink_that_takes_nothing_delays_ports_for_a_bounded_time() {
    let (clock, (ours, outside)) = (Arc::new(ManualClock::default()), memory::pair(2).unwrap());
    let switch = Switch::without_thread(Some(Arc::new(ours)), MTU, Arc::clone(&clock) as _).unwrap();
    let [one, two] = plug(&switch, [1, 2]);
    let sent: Vec<_> = (0..).zip([mac(9), mac(9), ALL, mac(2)]).map(|(n, to)| frame(to, mac(1), n, 60)).collect();
    let almost = stall::LIMIT - Duration::from_millis(1);
    assert!(one.readiness().wait.is_none());
    assert_eq!(one.send(&frames(&sent), 0), 2, "frames behind a waiting one wait as well, to keep their order");
    assert_eq!(one.readiness().wait, Some(stall::LIMIT), "the port must retry");
    assert_eq!(one.send(&frames(&sent), 2), 0);
    clock.advance(almost);
    assert_eq!((one.send(&frames(&sent), 2), numbers(&receive(&*two))), (0, vec![]));
    // Frames for other ports tell nothing about the uplink, nor does an empty send that checks for unsent frames.
    assert_eq!(two.send(&frames(&[frame(mac(1), mac(2), 7, 60)]), 0), 1);
    assert_eq!(two.send(&frames(&[]), 0), 0);
    clock.advance(Duration::from_millis(1));
    assert_eq!((one.send(&frames(&sent), 2), numbers(&receive(&*two))), (2, vec![2, 3]));
    assert_eq!(one.send(&frames(&sent), 0), 4, "frames for a stalled uplink are dropped without a wait");
    assert_eq!((figure(&*one, "switch_dropped_uplink"), one.readiness().wait), (4, None));
    // The other end reads again.
    assert_eq!(numbers(&receive(&outside)), [0, 1]);
    let up = |count| one.send(&frames(&vec![sent[0].clone(); count]), 0);
    assert_eq!(up(3), 2);
    clock.advance(almost);
    assert_eq!(numbers(&receive(&outside)), [0, 0]);
    assert_eq!(up(3), 2);
    clock.advance(almost);
    assert_eq!(up(1), 0, "the uplink has taken a frame meanwhile");
}

/// The other end of the uplink sends back all frames that it gets, including the sender's own group frames.
#[test]
fn a_hairpin_delivers_returned_frames() {
    let (ours, outside) = memory::pair(100).unwrap();
    let switch = Switch::hairpin_without_thread(Arc::new(ours), MTU, Arc::new(ManualClock::default())).unwrap();
    let [one] = plug(&switch, [1]);
    let exchange = |from: &SwitchPort, sent: &[Vec<u8>]| {
        assert_eq!(from.send(&frames(sent), 0), sent.len());
        assert_eq!(receive(&outside), sent, "all frames leave");
        outside.send(&frames(sent), 0);
        while switch.service() {}
    };
    exchange(&one, &[frame(ALL, mac(1), 0, 60), frame(mac(2), mac(1), 1, 60)]);
    assert!(receive(&*one).is_empty());
    let [two, three] = plug(&switch, [2, 3]);
    let to_all = frame(ALL, mac(1), 2, 60);
    exchange(&one, &[frame(mac(2), mac(1), 1, 60), to_all, frame(mac(9), mac(1), 3, 60)]);
    let got = [&one, &two, &three].map(|port| numbers(&receive(&**port)));
    assert_eq!(got, [vec![], vec![1, 2], vec![2]]);
    // Frames come by no other path.
    assert_eq!(two.send(&frames(&[frame(mac(1), mac(2), 4, 60)]), 0), 1);
    assert!(receive(&*one).is_empty());
}

/// Between ports a long frame stays whole; to an uplink that does not accept long frames it goes in segments.
#[test]
fn long_frames_are_cut_for_the_uplink_alone() {
    let (switch, outside, _) = switch(100);
    let [one, two] = plug(&switch, [1, 2]);
    let (local, segmentation) = long_tcp(mac(2).0, mac(1).0, &data(20_000), 1448);
    let (remote, _) = long_tcp(mac(9).0, mac(1).0, &data(20_000), 1448);
    let (to_all, _) = long_tcp(ALL.0, mac(1).0, &data(3000), 1448);
    let (too_long, jumbo) = long_tcp(mac(2).0, mac(1).0, &data(20_000), 1500);
    let mut sent = Frames::default();
    for (frame, offload) in
        [(&local, segmentation), (&remote, segmentation), (&to_all, segmentation), (&too_long, jumbo)]
    {
        assert!(one.takes(frame, offload));
        sent.push_with_offload(frame, offload);
    }
    assert_eq!(one.send(&sent, 0), 4);
    let mut got = Frames::default();
    two.receive(&mut got, 64);
    let got: Vec<_> = got.iter_with_offloads(0).collect();
    assert_eq!(got, [(&local[..], segmentation), (&to_all, segmentation)]);
    assert_eq!(figure(&*one, "switch_dropped_too_long"), 1, "its segments are longer than the network's MTU");
    let left = receive(&outside);
    assert_eq!((left.len(), carried(&left[..14]), carried(&left[14..])), (17, data(20_000), data(3000)));
    // The same holds for a port that has the uplink to itself.
    drop(two);
    let mut sent = Frames::default();
    sent.push_with_offload(&remote, segmentation);
    assert_eq!((one.send(&sent, 0), carried(&receive(&outside))), (1, data(20_000)));
}

#[test]
fn frames_go_by_address() {
    let (switch, outside, _) = switch(100);
    let [one, two] = plug(&switch, [1, 2]);
    let bridge = switch.port(mac(3), UnknownUnicast::Flood).unwrap();
    let ports = [&one, &two, &bridge];
    let came = [mac(1), mac(2), mac(3), mac(4), ALL].map(|to| frame(to, mac(9), to.0[5].into(), 60));
    outside.send(&frames(&came), 0);
    outside.send(&frames(&[vec![2, 0, 0]]), 0);
    assert!(receive(&*one).is_empty(), "not before the switch has moved them");
    while switch.service() {}
    assert_eq!(ports.map(|port| numbers(&receive(&**port))), [vec![1, 255], vec![2, 255], vec![3, 4, 255]]);
    let unknown = switch.counters().into_iter().find(|counter| counter.name == "switch_dropped_unknown").unwrap();
    assert_eq!(unknown.value, 1, "half a frame");
    let sent = [mac(1), mac(2), mac(3), mac(4), ALL].map(|to| frame(to, mac(1), to.0[5].into(), 60));
    assert_eq!(one.send(&frames(&sent), 0), 5);
    // No frame comes back to its sender, even if it is sent to the sender's own address.
    assert_eq!(ports.map(|port| numbers(&receive(&**port))), [vec![], vec![2, 255], vec![3, 4, 255]]);
    assert_eq!(numbers(&receive(&outside)), [4, 255]);
    assert_eq!(figure(&*one, "switch_dropped_unknown"), 1);
    assert_eq!(ports.map(|port| figure(&**port, "switch_frames_received")), [0, 2, 3]);
    // Frames between ports have the same length limit as frames to the uplink.
    let long = [1518, 1519].map(|length| frame(mac(2), mac(1), 7, length));
    assert_eq!(one.send(&frames(&long), 0), 2);
    assert_eq!(receive(&*two), long[..1]);
    assert_eq!(figure(&*one, "switch_dropped_too_long"), 1);
}

#[test]
fn a_network_may_end_here() {
    let switch = Switch::new(None, MTU).unwrap();
    let [one] = plug(&switch, [1]);
    let question = frames(&[frame(ALL, mac(1), 1, 60), frame(mac(2), mac(1), 2, 60)]);
    assert_eq!((one.send(&question, 0), figure(&*one, "switch_dropped_unknown")), (2, 2));
    let [two] = plug(&switch, [2]);
    assert_eq!(one.send(&question, 0), 2);
    assert!(readable(&*two));
    assert_eq!(numbers(&receive(&*two)), [1, 2]);
    assert!(!readable(&*two));
    assert_eq!(one.inspect().kind, "switch");
    assert!(switch.0.is_threadless(), "there is nothing to read");
}

#[test]
fn addresses_are_unique_and_of_one_station() {
    let (switch, _outside, _) = switch(1);
    let [one, _two] = plug(&switch, [1, 2]);
    assert!(
        matches!(switch.port(mac(1), UnknownUnicast::Flood), Err(SwitchError::InUse(address)) if address == mac(1))
    );
    assert!(matches!(switch.port(ALL, UnknownUnicast::Drop), Err(SwitchError::Group(_))));
    one.unplug();
    let again = plug(&switch, [1])[0].clone();
    // The old port is removed, and dropping it does not remove the new one.
    drop(one);
    assert!(matches!(switch.port(mac(1), UnknownUnicast::Drop), Err(SwitchError::InUse(_))));
    // A port can be removed although its owner still holds it.
    again.detach();
    let [_third] = plug(&switch, [1]);
    drop(again);
    assert!(matches!(switch.port(mac(1), UnknownUnicast::Drop), Err(SwitchError::InUse(_))));
}

/// A station that moves here, or away, has a port at both ends of the uplink for a while.
#[test]
fn frames_to_a_silent_port_go_to_the_uplink_as_well() {
    let (switch, outside, _) = switch(100);
    let [one, two] = plug(&switch, [1, 2]);
    let say = |port: &SwitchPort, to: u8, number: u32| {
        let from = port.address();
        assert_eq!(port.send(&frames(&[frame(mac(to), from, number, 60)]), 0), 1);
    };
    let heard = || (numbers(&receive(&*two)), numbers(&receive(&outside)));
    switch.silence(mac(2));
    switch.silence(mac(7));
    say(&one, 2, 1);
    assert_eq!(heard(), (vec![1], vec![1]), "the station may still be beyond the uplink");
    // The switch sends no frame back to the uplink.
    outside.send(&frames(&[frame(mac(2), mac(9), 2, 60)]), 0);
    switch.service();
    assert_eq!(heard(), (vec![2], vec![]));
    say(&two, 1, 3);
    say(&one, 2, 4);
    assert_eq!(heard(), (vec![4], vec![]), "the station is here");
    switch.silence(mac(2));
    say(&one, 2, 5);
    assert_eq!(heard(), (vec![5], vec![5]), "the station has moved away");
    say(&two, 9, 6);
    say(&one, 2, 7);
    assert_eq!(heard(), (vec![7], vec![6]), "it is back");
}

#[test]
fn an_unplugged_port_receives_and_sends_nothing() {
    let (switch, outside, _) = switch(100);
    let [one, two] = plug(&switch, [1, 2]);
    one.unplug();
    assert!(readable(&*one), "a waiting thread looks again");
    assert!(receive(&*one).is_empty() && !readable(&*one) && one.readiness().writable.is_none());
    outside.send(&frames(&[frame(mac(1), mac(9), 1, 60), frame(mac(2), mac(9), 2, 60)]), 0);
    assert_eq!(one.send(&frames(&[frame(mac(2), mac(1), 3, 60)]), 0), 1);
    assert_eq!((numbers(&receive(&*two)), receive(&*one).len(), receive(&outside).len()), (vec![2], 0, 0));
    // The same holds when the switch has been dropped.
    let [three] = plug(&switch, [3]);
    two.send(&frames(&[frame(mac(3), mac(2), 1, 60)]), 0);
    drop(switch);
    assert!(readable(&*two) && readable(&*three));
    assert_eq!(numbers(&receive(&*three)), [1], "a delivered frame can still be received");
    assert_eq!(two.send(&frames(&[frame(mac(3), mac(2), 2, 60)]), 0), 1);
    assert!(receive(&*three).is_empty() && !readable(&*three));
}

/// The owner of a removed port does not wait for the uplink, and other ports are not told to make room for it.
#[test]
fn a_port_that_was_unplugged_waits_for_no_room() {
    let (switch, outside, _) = switch(4);
    let [one, two] = plug(&switch, [1, 2]);
    // The uplink takes four segments of this frame, and the others wait in front of it.
    let (long, segmentation) = long_tcp(mac(9).0, mac(2).0, &data(20_000), 1448);
    let mut sent = Frames::default();
    sent.push_with_offload(&long, segmentation);
    assert_eq!(two.send(&sent, 0), 1);
    assert_eq!(one.send(&frames(&[frame(mac(9), mac(1), 1, 60)]), 0), 0);
    assert_eq!((one.unsent(), two.unsent(), switch.inspect().waiting_for_uplink), (true, true, 1));
    one.detach();
    assert_eq!((one.unsent(), two.unsent(), switch.inspect().waiting_for_uplink), (false, true, 0));
    assert_eq!(one.send(&frames(&[frame(mac(9), mac(1), 2, 60)]), 0), 1, "it is lost");
    drop(one);
    assert_eq!((switch.inspect().waiting_for_uplink, receive(&outside).len()), (0, 4));
}

#[test]
fn a_flood_of_a_port_takes_no_room_from_others() {
    let (switch, outside, _) = switch(200);
    let [victim, flood, other] = plug(&switch, [1, 2, 3]);
    let flooding = |port: &SwitchPort, length| {
        let full = |port: &SwitchPort| figure(port, "switch_dropped_full");
        let before = full(&victim);
        let batch = frames(&vec![frame(mac(1), port.address(), 7, length); 1000]);
        while full(&victim) == before {
            port.send(&batch, 0);
        }
    };
    for length in [60, 1500] {
        flooding(&flood, length);
        let load = |switch: &Switch| switch.inspect().ports.taken().unwrap()[0].queued_bytes.taken().unwrap();
        let half = load(&switch);
        assert!(half.abs_diff(CAPACITY / 2) < 2000, "{half}");
        // Frames of others arrive, from inside and from outside, and a second flooding sender changes nothing.
        flooding(&other, length);
        assert!(load(&switch) <= CAPACITY);
        let before = figure(&*victim, "switch_dropped_full");
        for number in 0..100 {
            outside.send(&frames(&[frame(mac(1), mac(9), 1000 + number, 1500)]), 0);
            assert!(switch.service());
        }
        assert_eq!(figure(&*victim, "switch_dropped_full"), before);
        let got = numbers(&receive(&*victim));
        assert_eq!(got.iter().filter(|&&number| number >= 1000).count(), 100);
        assert!(got.len() >= (half / (length + FRAME_COST)) && load(&switch) == 0);
    }
    assert_eq!((receive(&*flood).len(), receive(&*other).len()), (0, 0));
}

#[test]
fn a_flood_of_the_uplink_leaves_room_for_others() {
    let (switch, outside, _) = switch(4);
    let [greedy, modest] = plug(&switch, [1, 2]);
    let many = frames(&vec![frame(mac(9), mac(1), 1, 60_000); 1000]);
    let few = frames(&vec![frame(mac(9), mac(2), 2, 60); 3]);
    assert_eq!(greedy.send(&many, 0), 4, "the uplink's queue has room for four");
    assert_eq!(modest.send(&few, 0), 0);
    assert_eq!((switch.inspect().waiting_for_uplink, receive(&outside).len()), (2, 4));
    // There is room for many frames, and the greedy port can send first. It does not get all of the room.
    let (switch, outside, _) = self::switch(1000);
    let [greedy, modest] = plug(&switch, [1, 2]);
    let filler = frames(&vec![frame(mac(9), mac(1), 0, 60); 1000]);
    assert_eq!((greedy.send(&filler, 0), modest.send(&few, 0)), (1000, 0));
    receive(&outside);
    let sent = greedy.send(&many, 0);
    assert!(sent * 60_000 < QUANTUM + 60_000 && sent > 1, "{sent}");
    assert_eq!(modest.send(&few, 0), 3);
    assert_eq!(numbers(&receive(&outside)).iter().filter(|&&number| number == 2).count(), 3);
    // No other port waits.
    assert_eq!(greedy.send(&many, 500), 500);
    assert_eq!(switch.inspect().waiting_for_uplink, 0);
    // A removed port no longer waits.
    assert_eq!((greedy.send(&many, 0), modest.send(&few, 0)), (500, 0));
    drop(modest);
    receive(&outside);
    assert_eq!((switch.inspect().waiting_for_uplink, greedy.send(&many, 500)), (1, 500));
}

#[test]
fn frames_that_the_uplink_does_not_take_are_delivered_once() {
    let (switch, outside, _) = switch(2);
    let [one, two] = plug(&switch, [1, 2]);
    let to = [mac(2), mac(9), ALL, mac(2), ALL, mac(2), mac(9)];
    let list: Vec<_> = to.iter().zip(0..).map(|(&to, number)| frame(to, mac(1), number, 60)).collect();
    let batch = frames(&list);
    let mut from = 0;
    let (mut outer, mut inner) = (Vec::new(), Vec::new());
    for step in [4, 3] {
        assert_eq!(one.send(&batch, from), step, "up to the first that the uplink has no room for");
        from += step;
        outer.extend(numbers(&receive(&outside)));
        inner.extend(numbers(&receive(&*two)));
    }
    assert_eq!((outer, inner), (vec![1, 2, 4, 6], vec![0, 2, 3, 4, 5]));
}

#[test]
fn faults_of_the_uplink_are_faults_of_all_ports() {
    let (ours, outside) = memory::pair(100_000).unwrap();
    let faults = Faults { loss: 1000, delay: 2000, ..Faults::default() };
    let uplink = Arc::new(FaultLink::both_ways(ours, faults, 7));
    let switch = Switch::without_thread(Some(uplink), MTU, Arc::new(ManualClock::default())).unwrap();
    let ports = plug(&switch, [1, 2]);
    let (mut inward, mut outward) = ([0; 2], 0);
    for number in 0..1000 {
        outside.send(&frames(&[1, 2].map(|to| frame(mac(to), mac(9), number, 60))), 0);
        for (port, from) in ports.iter().zip([1, 2]) {
            assert_eq!(port.send(&frames(&[frame(mac(9), mac(from), number, 60)]), 0), 1);
        }
        switch.service();
        for (port, count) in ports.iter().zip(&mut inward) {
            *count += receive(&**port).len();
        }
        outward += receive(&outside).len();
    }
    for _ in 0..=Faults::MAX_DELAY {
        switch.service();
    }
    let inward: usize = inward.iter().sum::<usize>() + ports.iter().map(|port| receive(&**port).len()).sum::<usize>();
    outward += receive(&outside).len();
    assert_eq!((inward + outward) as u64 + ports[0].lost(), 4000);
    assert!((1600..1950).contains(&inward) && (1600..1950).contains(&outward), "{inward} {outward}");
}

#[test]
fn a_switch_describes_itself() {
    let (switch, _outside, _) = switch(1);
    let [two, one] = plug(&switch, [2, 1]);
    two.send(&frames(&[frame(mac(1), mac(2), 0, 100)]), 0);
    let port = |number, frames: usize| SwitchPortInspect {
        mac: mac(number),
        flood: false,
        queued_frames: Snapshot::Taken(frames),
        queued_bytes: Snapshot::Taken(frames * (100 + FRAME_COST)),
        dropped_full: 0,
    };
    let SwitchInspect { uplink, ports, .. } = switch.inspect();
    assert_eq!((uplink.unwrap().kind, ports.taken().unwrap()), ("memory", vec![port(1, 1), port(2, 0)]));
    drop(one);
}

/// Link that records the addresses it was asked for.
#[derive(Debug)]
struct Asked(MemoryLink, Mutex<Vec<BTreeSet<u8>>>);

impl Link for Asked {
    fn receive(&self, frames: &mut Frames, most: usize) {
        self.0.receive(frames, most);
    }

    fn send(&self, frames: &Frames, from: usize) -> usize {
        self.0.send(frames, from)
    }

    fn readiness(&self) -> Readiness {
        self.0.readiness()
    }

    fn set_addresses(&self, addresses: &[MacAddr]) -> io::Result<()> {
        if addresses.contains(&mac(7)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        self.1.lock().push(addresses.iter().map(|address| address.0[5]).collect());
        Ok(())
    }

    fn lost(&self) -> u64 {
        0
    }

    fn inspect(&self) -> LinkInspect {
        self.0.inspect()
    }
}

#[test]
fn the_uplink_gets_the_addresses_of_the_ports() {
    let asked = Arc::new(Asked(memory::pair(1).unwrap().0, Mutex::default()));
    let switch = Switch::new(Some(Arc::clone(&asked) as Arc<dyn Link>), MTU).unwrap();
    let [one, _two] = plug(&switch, [1, 2]);
    assert!(matches!(switch.port(mac(7), UnknownUnicast::Drop), Err(SwitchError::Io(_))));
    drop(one);
    assert!(switch.0.is_threadless(), "one port is left");
    assert!(matches!(switch.port(mac(7), UnknownUnicast::Drop), Err(SwitchError::Io(_))));
    assert!(switch.0.is_threadless(), "one port is left, which polls the uplink itself");
    assert_eq!(*asked.1.lock(), [&[1][..], &[1, 2], &[2]].map(|list| list.iter().copied().collect()));
}

proptest! {
    /// Every frame arrives exactly at its destinations, in the order in which its sender sent it.
    #[test]
    fn no_port_gets_a_frame_for_another(
        flood in prop::collection::vec(any::<bool>(), 0..5),
        steps in prop::collection::vec((0..6_u8, 0..7_u8), 1..200),
    ) {
        let (switch, outside, _) = switch(1000);
        let ports: Vec<_> = flood.iter().zip(1..).map(|(&flood, number)| {
            let unknown = if flood { UnknownUnicast::Flood } else { UnknownUnicast::Drop };
            (number, switch.port(mac(number), unknown).unwrap())
        }).collect();
        let mut expected: BTreeMap<u8, Vec<u32>> = BTreeMap::new();
        for (number, (from, to)) in (0..).zip(steps) {
            let sender = ports.iter().find(|(number, _)| *number == from);
            let to_address = if to == 0 { ALL } else { mac(to) };
            let batch = frames(&[frame(to_address, mac(from), number, 60)]);
            let has = |port: u8| ports.iter().any(|(number, _)| *number == port);
            for (&flood, &(port, _)) in flood.iter().zip(&ports) {
                let gets = to == port || to == 0 || flood && !has(to);
                if gets && port != from {
                    expected.entry(port).or_default().push(number);
                }
            }
            match sender {
                Some((_, port)) => {
                    prop_assert_eq!(port.send(&batch, 0), 1);
                    // A port that is alone sends all frames to the uplink.
                    if !has(to) || ports.len() == 1 {
                        expected.entry(0).or_default().push(number);
                    }
                }
                None => {
                    outside.send(&batch, 0);
                    // Makes the order of two senders deterministic.
                    switch.service();
                    if ports.len() == 1 {
                        continue;
                    }
                }
            }
        }
        for (number, port) in &ports {
            prop_assert_eq!(numbers(&receive(&**port)), expected.remove(number).unwrap_or_default());
        }
        prop_assert_eq!(numbers(&receive(&outside)), expected.remove(&0).unwrap_or_default());
    }
}

/// Waits for a port as a device does, and counts the frames that arrive.
struct Station {
    port: Arc<SwitchPort>,
    got: Mutex<Vec<u32>>,
    count: AtomicU64,
    waker: OwnedFd,
    stopping: AtomicBool,
}

impl Station {
    fn new(switch: &Switch, number: u8) -> Arc<Self> {
        let port = switch.port(mac(number), UnknownUnicast::Drop).unwrap();
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Arc::new(Self {
            port,
            got: Mutex::default(),
            count: AtomicU64::new(0),
            waker,
            stopping: AtomicBool::new(false),
        })
    }

    /// Has no timeout: if a wake-up is lost, the test does not end.
    fn work(&self) {
        let mut frames = Frames::default();
        while !self.stopping.load(Ordering::Acquire) {
            frames.clear();
            self.port.receive(&mut frames, 64);
            if !frames.is_empty() {
                self.got.lock().extend(numbers(&frames.iter().map(<[u8]>::to_vec).collect::<Vec<_>>()));
                self.count.fetch_add(frames.len() as u64, Ordering::Release);
                continue;
            }
            let Readiness { readable, changed, .. } = self.port.readiness();
            let mut fds = vec![PollFd::new(&self.waker, PollFlags::IN)];
            for fd in [&readable, &changed].into_iter().flatten() {
                fds.push(PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN));
            }
            rustix::event::poll(&mut fds, None).unwrap();
        }
    }

    /// Waits until it has received this number of frames.
    fn expect(&self, count: u64) {
        while self.count.load(Ordering::Acquire) < count {
            thread::yield_now();
        }
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        rustix::io::write(&self.waker, &1_u64.to_ne_bytes()).unwrap();
    }
}

#[test]
fn no_wake_up_is_lost_while_ports_come_and_go() {
    const ROUNDS: u32 = 300;
    let (ours, outside) = memory::pair(1000).unwrap();
    let switch = Switch::new(Some(Arc::new(ours)), MTU).unwrap();
    let first = Station::new(&switch, 1);
    thread::scope(|scope| {
        scope.spawn(|| first.work());
        for round in 0..ROUNDS {
            // One frame from outside, to a sleeping host.
            outside.send(&frames(&[frame(mac(1), mac(9), round * 4, 60)]), 0);
            first.expect(u64::from(round) * 4 + 1);
            let second = Station::new(&switch, 2);
            thread::scope(|scope| {
                scope.spawn(|| second.work());
                // Frames from the other port and from outside, while the topology is still changing.
                let both = [1, 2].map(|to| frame(mac(to), mac(9), round * 4 + 1, 60));
                outside.send(&frames(&both), 0);
                first.expect(u64::from(round) * 4 + 2);
                second.port.send(&frames(&[frame(mac(1), mac(2), round * 4 + 2, 60)]), 0);
                first.port.send(&frames(&[frame(mac(2), mac(1), round * 4 + 2, 60)]), 0);
                first.expect(u64::from(round) * 4 + 3);
                second.expect(2);
                second.stop();
            });
            drop(second);
            outside.send(&frames(&[frame(mac(1), mac(9), round * 4 + 3, 60)]), 0);
            first.expect(u64::from(round) * 4 + 4);
        }
        first.stop();
    });
    assert!(first.got.lock().iter().copied().eq(0..ROUNDS * 4), "each once, in order");
}

#[test]
fn a_stream_of_frames_keeps_its_order_through_changes() {
    const FRAMES: u32 = 200_000;
    let (ours, outside) = memory::pair(256).unwrap();
    let switch = Switch::new(Some(Arc::new(ours)), MTU).unwrap();
    let first = Station::new(&switch, 1);
    let start = Barrier::new(2);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| first.work());
        scope.spawn(|| {
            start.wait();
            while !done.load(Ordering::Acquire) {
                let port = switch.port(mac(2), UnknownUnicast::Drop).unwrap();
                thread::yield_now();
                drop(port);
                thread::yield_now();
            }
        });
        start.wait();
        let mut number = 0;
        while number < FRAMES {
            let list: Vec<_> = (number..(number + 32).min(FRAMES)).map(|n| frame(mac(1), mac(9), n, 60)).collect();
            let batch = frames(&list);
            let mut from = 0;
            while from < batch.len() {
                from += outside.send(&batch, from);
                thread::yield_now();
            }
            number += 32;
            // The queue holds more than this, so no frame may be lost.
            first.expect(u64::from(number).saturating_sub(10_000));
        }
        first.expect(FRAMES.into());
        done.store(true, Ordering::Release);
        first.stop();
    });
    assert!(first.got.lock().iter().copied().eq(0..FRAMES));
}

/// Without an uplink no other host is behind a port, whatever wraps it.
#[test]
fn a_port_without_an_uplink_stays_in_the_process() {
    let wrapped = |uplink: Option<Arc<dyn Link>>| {
        let port = Switch::new(uplink, MTU).unwrap().port(mac(1), UnknownUnicast::Drop).unwrap();
        FaultLink::both_ways(GsoLink::new(Arc::new(port)), Faults::default(), 0).leaves_process()
    };
    assert!(!wrapped(None));
    let (uplink, _other) = memory::pair(CAPACITY).unwrap();
    assert!(wrapped(Some(Arc::new(uplink))));
}
