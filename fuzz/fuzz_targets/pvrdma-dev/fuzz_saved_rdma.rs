//! Saved states with changes, and any bytes, restored into a device, which must then be usable or as after a reset.
#![no_main]

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pvrdma_dev::testing::{Driver, GuestMemory, TestDevice};
use pvrdma_link::{Clock, Link, ManualClock, memory};
use pvrdma_pci_function::PciFunction;
use pvrdma_rxe::{PortConfig, Rxe, RxeConfig};
use pvrdma_saved_state::{
    Header,
    testing::{Change, Records, change, join, split},
};

/// Numbers that stand for a [`Change`].
type Edit = (u8, u16, u16, u8);

#[derive(Arbitrary, Debug)]
enum State {
    /// One of the kept states, with changes.
    Changed(u8, Vec<Edit>),
    /// The beginning of one, with other bytes behind it.
    Cut(u8, u16, Vec<u8>),
    Any(Vec<u8>),
}

/// The kept states, which are states of releases.
fn kept() -> &'static [(Header, Records)] {
    static KEPT: OnceLock<Vec<(Header, Records)>> = OnceLock::new();
    KEPT.get_or_init(|| {
        let states: &[&[u8]] = &[
            include_bytes!("../../../pvrdma-dev/tests/data/saved/armed-queue.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/half-a-message.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/local-request.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/request-not-begun.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/receive-in-use.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/repeatable-atomic.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/RNR-wait.state"),
            include_bytes!("../../../pvrdma-dev/tests/data/saved/unacknowledged-packets.state"),
        ];
        states.iter().map(|state| split(state).unwrap()).collect()
    })
}

impl State {
    fn bytes(&self) -> Vec<u8> {
        let base = |which: u8| &kept()[usize::from(which) % kept().len()];
        match self {
            Self::Changed(which, edits) => {
                let (header, mut records) = base(*which).clone();
                change(&mut records, edits.iter().copied().map(Change::from));
                join(&header, &records).unwrap_or_default()
            }
            Self::Cut(which, at, rest) => {
                let (header, records) = base(*which);
                let state = join(header, records).unwrap();
                [&state[..usize::from(*at) % state.len()], rest].concat()
            }
            Self::Any(bytes) => bytes.clone(),
        }
    }
}

fuzz_target!(|input: (State, bool, bool)| {
    let (state, alone, wire) = input;
    let clock = Arc::new(ManualClock::default());
    let config = RxeConfig::default().with_workers(0).with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let rxe = Rxe::new(config).unwrap();
    let station = rxe.station(TestDevice::<Rxe>::mac(1));
    if wire {
        let uplink: Arc<dyn Link> = Arc::new(memory::pair(64).unwrap().0);
        station.plug(PortConfig::new(uplink, 4500)).unwrap();
    }
    let memory = GuestMemory::new(16 << 20);
    let test = TestDevice::new(&rxe, TestDevice::<Rxe>::config(1), Arc::clone(&memory));
    // An uplink keeps memory, too.
    let before = test.device.status();
    let bytes = state.bytes();
    let mut from = bytes.as_slice();
    let restored = if alone { test.device.restore_alone(&mut from) } else { test.device.restore(&mut from) };
    let restored = restored.and_then(|()| test.device.finish_restore());
    if restored.is_ok() {
        // The restored device can be saved, and continues whatever the guest's memory contains.
        test.device.save(&mut Vec::new()).unwrap();
        test.device.resume();
        for _ in 0..4 {
            (0..64).take_while(|_| rxe.run_some(64) > 0).for_each(drop);
            let now = clock.now();
            let next = rxe.next_deadline().map_or(now, |deadline| deadline.max(now));
            clock.advance((next - now).min(Duration::from_secs(1)));
        }
        test.device.reset();
    }
    // As after a reset.
    let status = test.device.status();
    assert_eq!((status.objects, status.kept.used_bytes), (before.objects, before.kept.used_bytes));
    let function = Arc::clone(&test.device) as Arc<dyn PciFunction>;
    let driver = Driver::probe(function, &memory, &test.irqs).expect("a driver can start the device");
    driver.create_pd(None).expect("a device without objects");
});
