//! Counts, times and effects of rules, on virtual time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pvrdma_link::{Clock, ManualClock};
use pvrdma_packet::MacAddr;
use pvrdma_verbs_types::{Gid, QpType, Qpn};

use super::*;
use crate::{Rxe, RxeConfig, RxeStation};

const MAC: MacAddr = MacAddr([2; 6]);
const QP: (QpType, Qpn) = (QpType::Rc, Qpn::new(0x101));
const SOURCE: Gid = Gid([7; 16]);

/// A backend that runs when the test runs it, and the faults of a device of it.
struct Fixture {
    rxe: Rxe,
    station: RxeStation,
    clock: Arc<ManualClock>,
    point: Arc<FaultPoint>,
    faults: Arc<DeviceFaults>,
    effects: Arc<Mutex<Vec<DeviceEffect>>>,
}

impl Fixture {
    fn new(rules: &[&str]) -> Self {
        let clock = Arc::new(ManualClock::default());
        let config = RxeConfig { workers: 0, clock: Arc::clone(&clock) as Arc<dyn Clock>, ..RxeConfig::default() };
        let rxe = Rxe::new(config).unwrap();
        let station = rxe.station(MAC);
        let point = Arc::clone(&station.place().faults);
        let (faults, effects) = (Arc::new(station.faults()), Arc::<Mutex<Vec<_>>>::default());
        let told = Arc::clone(&effects);
        faults.apply_by(move |effect| told.lock().push(effect));
        let fixture = Self { rxe, station, clock, point, faults, effects };
        fixture.set(rules);
        fixture
    }

    fn set(&self, rules: &[&str]) {
        self.faults.set(&rules.iter().map(|rule| rule.parse().unwrap()).collect::<Vec<_>>()).unwrap();
    }

    fn at(&self, site: Site, qp: (QpType, Qpn)) -> Option<Fault> {
        self.point.at(site, qp, || self.clock.now())
    }

    fn request(&self) -> Option<Fault> {
        self.point.at_request(QP, Some(SOURCE), self.clock.now())
    }

    /// Lets time pass, and returns the effects that faults have had on the device since the last call.
    fn pass(&self, millis: u64) -> Vec<DeviceEffect> {
        self.clock.advance(Duration::from_millis(millis));
        self.rxe.run_ready();
        std::mem::take(&mut self.effects.lock())
    }

    fn counts(&self) -> Vec<(u64, u64)> {
        self.faults.status().iter().map(|status| (status.seen, status.happened)).collect()
    }
}

/// Returns the times, of the first `count`, at which a rule acts.
fn times(rule: &str, count: u64) -> Vec<u64> {
    let fixture = Fixture::new(&[rule]);
    let site = fixture.faults.status()[0].rule.fault.site();
    (1..=count).filter(|_| fixture.at(site, QP).is_some()).collect()
}

#[test]
fn counts_decide() {
    assert_eq!(times("loss/nth:5", 20), [5]);
    assert_eq!(times("loss/nth:5/times:3", 20), [5, 6, 7]);
    assert_eq!(times("loss/nth:18/times:always", 20), [18, 19, 20]);
    assert_eq!(times("loss/every:7", 20), [7, 14]);
    assert_eq!(times("loss/every:7/times:1", 20), [7]);
    assert_eq!(times("loss/one-in:1", 3), [1, 2, 3]);
}

#[test]
fn the_same_seed_gives_the_same_sequence() {
    for fault in ["loss", "response-loss", "bad-response", "delay"] {
        let sequence = |seed: u64| times(&format!("{fault}/one-in:10/seed:{seed}"), 1000);
        for seed in 0..20 {
            assert_eq!(sequence(seed), sequence(seed));
            assert!((50..200).contains(&sequence(seed).len()), "{}", sequence(seed).len());
            assert_ne!(sequence(seed), sequence(seed + 1));
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_jitter() {
    let delays = |seed: u64| -> Vec<_> {
        let fixture = Fixture::new(&[&format!("delay/every:2/by:20ms/jitter:5ms/seed:{seed}")]);
        (0..100).map(|_| fixture.point.turn(QP, None, Duration::ZERO).begins).collect()
    };
    for seed in 0..20 {
        assert_eq!(delays(seed), delays(seed));
        assert_ne!(delays(seed), delays(seed + 1));
        let is_right = |(at, delay): (usize, &Duration)| match at % 2 {
            0 => delay.is_zero(),
            _ => (20_000..=25_000).contains(&delay.as_micros()),
        };
        assert!(delays(seed).iter().enumerate().all(is_right), "{:?}", delays(seed));
    }
    let fixture = Fixture::new(&["delay/by:1500us"]);
    assert_eq!(fixture.point.turn(QP, None, Duration::ZERO).begins, Duration::from_micros(1500));
}

#[test]
fn other_queue_pairs_and_places_are_not_counted() {
    let fixture = Fixture::new(&["loss/qp:0x101/nth:2", "rnr", "remote-access/nth:3"]);
    assert_eq!(fixture.at(Site::Arrival, (QpType::Rc, Qpn::new(0x102))), None);
    assert_eq!(fixture.at(Site::Arrival, (QpType::Gsi, Qpn::new(0x101))), None);
    assert_eq!((fixture.at(Site::Arrival, QP), fixture.at(Site::Arrival, QP)), (None, Some(Fault::Loss)));
    assert_eq!(fixture.at(Site::Wanted, QP), Some(Fault::Rnr));
    assert_eq!(fixture.counts(), [(2, 1), (1, 1), (0, 0)]);
}

#[test]
fn the_nth_connection_is_counted_alone_and_until_its_queue_pair_has_another_one() {
    let fixture = Fixture::new(&["loss/connection:2/times:always"]);
    let [first, second] = [0x101, 0x102].map(|number| (QpType::Rc, Qpn::new(number)));
    let lost = |qp| fixture.at(Site::Arrival, qp).is_some();
    fixture.point.connected(first);
    fixture.point.connected((QpType::Ud, Qpn::new(0x103)));
    assert!(!lost(first) && !lost(second));
    fixture.point.connected(second);
    assert!(!lost(first) && lost(second) && lost(second));
    fixture.point.connected(second);
    assert!(!lost(first) && !lost(second));
    assert_eq!(fixture.counts(), [(2, 2)]);
}

#[test]
fn a_revoked_key_stays_revoked_until_the_rules_change() {
    let fixture = Fixture::new(&["key-revoked/nth:2"]);
    let at = |key| fixture.point.at_key(QP, key, || Duration::ZERO);
    assert_eq!([at(7), at(8), at(7), at(8), at(8)], {
        let revoked = Some(Fault::KeyRevoked);
        [None, revoked, None, revoked, revoked]
    });
    fixture.set(&[]);
    assert!(!fixture.point.is_active() && at(8).is_none());
}

#[test]
fn times_decide() {
    let fixture = Fixture::new(&["loss/after:20ms", "rnr/nth:2/for:30ms"]);
    let lost = || fixture.at(Site::Arrival, QP).is_some();
    let (early, late) = (lost(), fixture.pass(20));
    assert_eq!((early, late, lost(), lost()), (false, vec![], true, false));
    let withheld = || fixture.at(Site::Wanted, QP).is_some();
    assert_eq!([withheld(), withheld(), withheld()], [false, true, true]);
    fixture.pass(29);
    assert!(withheld());
    fixture.pass(1);
    assert!(!withheld());
}

#[test]
fn a_link_goes_down_with_a_request_and_comes_up_in_time() {
    let fixture = Fixture::new(&["link-down/nth:2/for:5ms"]);
    assert_eq!((fixture.request(), fixture.point.is_cut(SOURCE)), (None, false));
    // Requests are lost from this one on, before the task has run.
    assert_eq!((fixture.request(), fixture.point.is_cut(SOURCE)), (Some(Fault::LinkDown), true));
    assert_eq!(fixture.pass(0), [DeviceEffect::Link { up: false }]);
    assert_eq!((fixture.pass(4), fixture.point.is_cut(SOURCE)), (vec![], true));
    assert_eq!(fixture.pass(1), [DeviceEffect::Link { up: true }]);
    assert_eq!((fixture.request(), fixture.point.is_cut(SOURCE)), (None, false));
}

/// The link flaps by time alone, and new rules end what the old ones began.
#[test]
fn a_link_flaps_without_requests() {
    let fixture = Fixture::new(&["link-down/after:20ms/for:5ms/times:3"]);
    let [down, up] = [false, true].map(|up| DeviceEffect::Link { up });
    let seen: Vec<_> = (1..=100).flat_map(|at| fixture.pass(1).into_iter().map(move |effect| (at, effect))).collect();
    assert_eq!(seen, [(20, down), (25, up), (45, down), (50, up), (70, down), (75, up)]);
    fixture.set(&["link-down/after:1ms"]);
    assert_eq!(fixture.pass(1), [down]);
    fixture.set(&[]);
    assert_eq!((fixture.pass(0), fixture.point.is_cut(SOURCE)), (vec![up], false));
}

#[test]
fn a_peer_goes_without_an_event() {
    let fixture = Fixture::new(&["peer-gone/nth:2"]);
    assert_eq!((fixture.at(Site::Arrival, QP), fixture.point.is_cut(SOURCE)), (None, false));
    assert_eq!((fixture.at(Site::Arrival, QP), fixture.point.is_cut(SOURCE)), (Some(Fault::PeerGone), true));
    assert_eq!(fixture.pass(1000), []);
    fixture.set(&[]);
    assert!(!fixture.point.is_cut(SOURCE));
}

#[test]
fn a_device_fails_once_and_works_when_it_has_started_again() {
    let fixture = Fixture::new(&["device-fatal/nth:2"]);
    fixture.request();
    assert_eq!((fixture.request(), fixture.point.is_cut(SOURCE)), (Some(Fault::DeviceFatal), true));
    assert_eq!(fixture.pass(0), [DeviceEffect::Fatal]);
    assert_eq!((fixture.request(), fixture.pass(1000), fixture.point.is_cut(SOURCE)), (None, vec![], false));
    fixture.set(&["device-fatal/after:2s"]);
    assert_eq!((fixture.pass(1999), fixture.pass(1), fixture.pass(9999)), (vec![], vec![DeviceEffect::Fatal], vec![]));
}

#[test]
fn only_the_gid_of_the_request_is_removed() {
    let fixture = Fixture::new(&["gid-removed/for:5ms"]);
    assert_eq!(fixture.request(), Some(Fault::GidRemoved));
    assert!(fixture.point.is_cut(SOURCE) && !fixture.point.is_cut(Gid([8; 16])));
    fixture.pass(5);
    assert!(!fixture.point.is_cut(SOURCE));
}

#[test]
fn rules_are_bounded_and_end_with_their_handle() {
    let rule = FaultRule::new(Fault::LinkDown);
    let Fixture { rxe, point, faults, .. } = Fixture::new(&[]);
    assert!(faults.set(&[rule; DeviceFaults::MAX_RULES + 1]).is_err());
    faults.set(&[rule; DeviceFaults::MAX_RULES]).unwrap();
    point.at_request(QP, None, Duration::ZERO);
    assert!(point.is_active() && point.is_cut(SOURCE));
    drop(faults);
    assert!(!point.is_active() && !point.is_cut(SOURCE));
    rxe.run_ready();
}

#[test]
fn a_link_comes_up_again_when_the_handle_is_dropped() {
    let Fixture { rxe, faults, effects, clock, .. } = Fixture::new(&["link-down/after:1ms"]);
    clock.advance(Duration::from_millis(1));
    rxe.run_ready();
    drop(faults);
    assert_eq!(*effects.lock(), [false, true].map(|up| DeviceEffect::Link { up }));
    rxe.run_ready();
    assert_eq!(effects.lock().len(), 2);
}

/// The drop of the handle does not wait for the effect, and the link comes up nevertheless.
#[test]
fn a_handle_can_be_dropped_while_its_link_goes_down() {
    let Fixture { rxe, faults, effects, clock, .. } = Fixture::new(&["link-down/after:1ms"]);
    let (told, dropped) = (Arc::clone(&effects), Arc::new(Mutex::new(None)));
    let handle = Arc::clone(&dropped);
    faults.apply_by(move |effect| {
        told.lock().push(effect);
        drop(handle.lock().take());
    });
    *dropped.lock() = Some(faults);
    clock.advance(Duration::from_millis(1));
    rxe.run_ready();
    assert_eq!(*effects.lock(), [false, true].map(|up| DeviceEffect::Link { up }));
}

/// A device is removed and added again, and the handle of the former device is dropped late.
#[test]
fn a_handle_that_was_replaced_changes_nothing() {
    let Fixture { rxe, station, faults: former, effects, clock, point } = Fixture::new(&["link-down/after:1ms"]);
    clock.advance(Duration::from_millis(1));
    rxe.run_ready();
    let faults = station.faults();
    assert!(faults.status().is_empty() && !point.is_active());
    let rule: FaultRule = "link-down/after:1ms".parse().unwrap();
    assert!(former.set(&[rule]).is_err());
    faults.set(&[rule]).unwrap();
    let told = Arc::<Mutex<Vec<_>>>::default();
    let list = Arc::clone(&told);
    faults.apply_by(move |effect| list.lock().push(effect));
    drop(former);
    clock.advance(Duration::from_millis(1));
    rxe.run_ready();
    assert_eq!((faults.status().len(), point.is_active()), (1, true));
    assert_eq!(*told.lock(), [DeviceEffect::Link { up: false }]);
    assert_eq!(*effects.lock(), [false, true].map(|up| DeviceEffect::Link { up }));
}

/// Applies the effects of a fixture with `meanwhile`, which is called while the device fails for the first time.
fn while_it_fails(fixture: &Fixture, meanwhile: impl Fn() + Send + Sync + 'static) {
    let (told, first) = (Arc::clone(&fixture.effects), Mutex::new(true));
    fixture.faults.apply_by(move |effect| {
        told.lock().push(effect);
        if effect == DeviceEffect::Fatal && std::mem::take(&mut *first.lock()) {
            meanwhile();
        }
    });
}

#[test]
fn a_gid_that_changes_while_the_device_fails_is_told() {
    let fixture = Fixture::new(&["device-fatal"]);
    let point = Arc::clone(&fixture.point);
    while_it_fails(&fixture, move || point.gids_changed());
    fixture.request();
    assert_eq!(fixture.pass(0), [DeviceEffect::Fatal, DeviceEffect::GidTable]);
}

#[test]
fn a_rule_that_is_set_while_the_device_fails_has_its_effect() {
    let fixture = Fixture::new(&["device-fatal"]);
    let (point, faults, now) = (Arc::clone(&fixture.point), Arc::downgrade(&fixture.faults), fixture.clock.now());
    while_it_fails(&fixture, move || {
        faults.upgrade().unwrap().set(&["device-fatal".parse().unwrap()]).unwrap();
        point.at_request(QP, Some(SOURCE), now);
    });
    fixture.request();
    assert_eq!(fixture.pass(0), [DeviceEffect::Fatal; 2]);
    assert_eq!((fixture.counts(), fixture.point.is_cut(SOURCE)), (vec![(1, 1)], false));
}
