//! Completion queues (conformance 38, 41, 45, 54, 60 to 62, 67 to 70, ring level).

use proptest::prelude::*;
use pvrdma_base::DeviceLog;
use pvrdma_pci_function::InterruptSink;
use pvrdma_verbs_types::Qpn;

use super::*;
use crate::events::EventRings;
use crate::testing::GuestMemory;
use crate::testing::ring_memory::{RingMemory, open_interrupts};

const HANDLE: u32 = 0x1234;

struct Silent;

impl InterruptSink for Silent {
    fn msix(&self, _vector: u16) {}
    fn intx(&self, _asserted: bool) {}
}

struct CqFixture {
    memory: Arc<GuestMemory>,
    events: RingMemory,
    notifications: RingMemory,
    guest: RingMemory,
    cq: Arc<CqRing>,
    entries: u32,
}

impl CqFixture {
    fn new(entries: u32, user: bool) -> Self {
        let memory = GuestMemory::new(4 << 20);
        let (events, notifications) = (RingMemory::in_memory(&memory, 4), RingMemory::in_memory(&memory, 4));
        let hub = EventHub::new(&DeviceLog::new("test"));
        hub.install(EventRings::new(events.list(), notifications.list(), open_interrupts(Arc::new(Silent))).unwrap());
        let guest = RingMemory::in_memory(&memory, 1 + (entries * 64).div_ceil(4096) as usize);
        let cq = CqRing::new(HANDLE, entries, guest.list(), user, hub).unwrap();
        Self { memory, events, notifications, guest, cq, entries }
    }

    fn complete(&self, completion: &Completion) -> Result<(), CqOverrun> {
        self.cq.complete(&self.memory.space().view(), completion)
    }

    fn arm(&self, solicited_only: bool, check_not_empty: bool) {
        self.cq.arm(&self.memory.space().view(), solicited_only, check_not_empty);
    }

    /// Returns the number of notifications published so far.
    fn notified(&self) -> u32 {
        self.memory.load(self.notifications.state() + 8)
    }

    fn entry(&self, index: u32) -> [u8; CQE_SIZE] {
        self.memory.read_vec(self.guest.slot(index, self.entries, 64), CQE_SIZE).try_into().unwrap()
    }

    fn consume(&self, head: u32) {
        self.memory.store(self.guest.state() + 12, head % (2 * self.entries));
    }
}

fn success(opcode: WcOpcode) -> Completion {
    Completion::new(0x21, 5, opcode, WcStatus::Success)
}

fn word(entry: &[u8; CQE_SIZE], at: usize) -> u32 {
    u32::from_le_bytes(entry[at..at + 4].try_into().unwrap())
}

/// Conformance 61, 62: all 64 bytes are written, over the previous content.
#[test]
fn layout() {
    let fixture = CqFixture::new(4, false);
    fixture.memory.write(fixture.guest.slot(0, 4, 64), &[0xff; 128]);
    let completion = Completion {
        byte_len: 0x0a0b,
        flags: WcFlags::GRH | WcFlags::IMMEDIATE,
        immediate: [1, 2, 3, 4],
        invalidated_key: 99,
        src_qpn: Qpn::new(0xabcdef),
        network: Some(NetworkType::Ipv4),
        service_level: 3,
        ..Completion::new(0x1_0021, 0x1122_3344_5566_7788, WcOpcode::Recv, WcStatus::Success)
    };
    fixture.complete(&completion).unwrap();
    let mut expected = [0; CQE_SIZE];
    expected[..8].copy_from_slice(&0x1122_3344_5566_7788_u64.to_le_bytes());
    expected[8] = 0x21;
    expected[16] = 128;
    expected[24..26].copy_from_slice(&[0x0b, 0x0a]);
    expected[28..32].copy_from_slice(&[1, 2, 3, 4]);
    expected[32..35].copy_from_slice(&[0xef, 0xcd, 0xab]);
    expected[36] = 1 | 2 | 1 << 6;
    expected[48] = 3;
    expected[50] = 1;
    expected[57] = 1;
    assert_eq!(fixture.entry(0), expected);
    let flags = WcFlags::INVALIDATED;
    fixture.complete(&Completion { flags, invalidated_key: 0x0102_0304, ..success(WcOpcode::Recv) }).unwrap();
    assert_eq!((word(&fixture.entry(1), 28), word(&fixture.entry(1), 36)), (0x0102_0304, 4));
}

/// Conformance 54, 60: opcodes and flags that a process would misinterpret never reach its queue.
#[test]
fn user_and_kernel_queues() {
    let opcodes = [
        (WcOpcode::Send, 0, 0),
        (WcOpcode::RdmaWrite, 1, 1),
        (WcOpcode::RdmaRead, 2, 2),
        (WcOpcode::CompareSwap, 3, 3),
        (WcOpcode::FetchAdd, 4, 4),
        (WcOpcode::LocalInvalidate, 7, 0),
        (WcOpcode::FastRegister, 8, 0),
        (WcOpcode::Recv, 128, 128),
        (WcOpcode::RecvRdmaWithImmediate, 129, 129),
    ];
    for user in [false, true] {
        let fixture = CqFixture::new(64, user);
        let mut index = 0;
        for (opcode, kernel_number, user_number) in opcodes {
            for network in [None, Some(NetworkType::RoceV1), Some(NetworkType::Ipv4), Some(NetworkType::Ipv6)] {
                fixture.complete(&Completion { flags: WcFlags::all(), network, ..success(opcode) }).unwrap();
                let flags = Completion { flags: WcFlags::INVALIDATED, network, ..success(opcode) };
                let entry = fixture.entry(index);
                assert_eq!(word(&entry, 16), if user { user_number } else { kernel_number });
                assert_eq!(word(&entry, 36) & 0x38, 0);
                assert!(!user || word(&entry, 36) & 0x44 == 0);
                index = (index + 1) % 128;
                fixture.consume(index);
                fixture.complete(&flags).unwrap();
                assert_eq!(word(&fixture.entry(index), 36) & 4, if user { 0 } else { 4 });
                index = (index + 1) % 128;
                fixture.consume(index);
            }
        }
    }
}

/// Conformance 38, 41, 45: a full queue is not overwritten; it becomes unusable, with a single CQ_ERR.
#[test]
fn overrun() {
    for entries in [1, 2, 128] {
        let fixture = CqFixture::new(entries, true);
        for index in 0..3 * entries {
            fixture.complete(&Completion { wr_id: index.into(), ..success(WcOpcode::Send) }).unwrap();
            fixture.consume(index + 1);
        }
        let tail = 3 * entries % (2 * entries);
        for _ in 0..entries {
            fixture.complete(&success(WcOpcode::Send)).unwrap();
        }
        let before: Vec<_> = (0..entries).map(|i| fixture.entry(i)).collect();
        let index = fixture.memory.load(fixture.guest.state() + 8);
        assert_eq!(index, (tail + entries) % (2 * entries));
        assert_eq!(fixture.memory.load(fixture.events.state() + 8), 0);
        for _ in 0..3 {
            assert_eq!(fixture.complete(&success(WcOpcode::RdmaRead)), Err(CqOverrun));
            fixture.consume(tail + 1);
        }
        assert_eq!((0..entries).map(|i| fixture.entry(i)).collect::<Vec<_>>(), before);
        assert_eq!(fixture.memory.load(fixture.guest.state() + 8), index);
        assert_eq!(fixture.memory.load(fixture.events.state() + 8), 1);
        assert_eq!(fixture.memory.read_vec(fixture.events.slot(0, 512, 8), 8), [0, 0, 0, 0, 0x34, 0x12, 0, 0]);
        assert_eq!(fixture.memory.read_vec(fixture.guest.state(), 8), [0; 8]);
        assert_eq!(fixture.memory.read_vec(fixture.guest.state() + 16, 4080), [0; 4080]);
    }
}

/// Conformance 38, 41, 67, 68: several completions at once are in order behind one index, cause one notification if
/// requested for any of them, and end where the queue is full.
#[test]
fn several_at_once() {
    let fixture = CqFixture::new(8, false);
    let all: Vec<_> = (0..6).map(|wr_id| Completion { wr_id, ..success(WcOpcode::Recv) }).collect();
    let complete_all =
        |completions: &[Completion]| fixture.cq.complete_all(&fixture.memory.space().view(), completions);
    assert_eq!(complete_all(&[]), 0);
    fixture.arm(true, false);
    assert_eq!((complete_all(&all[..2]), fixture.notified()), (2, 0));
    let mut solicited = all.clone();
    (solicited[3].solicited, solicited[4].solicited) = (true, true);
    assert_eq!((complete_all(&solicited[2..]), fixture.notified()), (4, 1));
    assert!((0..6).all(|index| u32::from(fixture.entry(index)[0]) == index));
    assert_eq!(fixture.memory.load(fixture.guest.state() + 8), 6);
    fixture.consume(1);
    assert_eq!(fixture.memory.load(fixture.events.state() + 8), 0);
    assert_eq!(complete_all(&all), 3, "the others do not fit");
    assert_eq!(fixture.memory.load(fixture.guest.state() + 8), 9);
    assert_eq!(fixture.memory.load(fixture.events.state() + 8), 1, "CQ_ERR");
    assert_eq!(complete_all(&all), 0);
}

/// Conformance 41: an invalid consumer index is detected at the latest when the queue seems full, and when arming
/// checks the queue.
#[test]
fn invalid_consumer_index() {
    for bad in [4, 7, 0x10, u32::MAX] {
        let fixture = CqFixture::new(4, true);
        fixture.memory.store(fixture.guest.state() + 12, bad);
        let accepted = (0..20).take_while(|_| fixture.complete(&success(WcOpcode::Send)).is_ok()).count();
        assert!(accepted <= 8, "{bad}");
        fixture.consume(0);
        if accepted <= 4 {
            assert_eq!(fixture.complete(&success(WcOpcode::Send)), Err(CqOverrun));
            assert_eq!(fixture.memory.load(fixture.events.state() + 8), 1);
        }
    }
    let fixture = CqFixture::new(4, true);
    fixture.memory.store(fixture.guest.state() + 12, 8);
    fixture.arm(false, true);
    assert_eq!(fixture.memory.load(fixture.events.state() + 8), 1);
    assert_eq!(fixture.complete(&success(WcOpcode::Send)), Err(CqOverrun));
}

/// Conformance 68: solicited receives and errors only; "solicited" does not replace an earlier "any".
#[test]
fn arm_solicited() {
    let fixture = CqFixture::new(64, true);
    let solicited = Completion { solicited: true, ..success(WcOpcode::Recv) };
    fixture.arm(true, false);
    fixture.complete(&success(WcOpcode::Send)).unwrap();
    fixture.complete(&success(WcOpcode::Recv)).unwrap();
    fixture.complete(&Completion { solicited: true, ..success(WcOpcode::Send) }).unwrap();
    assert_eq!(fixture.notified(), 0);
    fixture.complete(&solicited).unwrap();
    fixture.complete(&solicited).unwrap();
    assert_eq!(fixture.notified(), 1);
    fixture.arm(true, false);
    fixture.complete(&Completion { solicited: true, ..success(WcOpcode::RecvRdmaWithImmediate) }).unwrap();
    assert_eq!(fixture.notified(), 2);
    fixture.arm(true, false);
    fixture.complete(&Completion::new(1, 1, WcOpcode::Send, WcStatus::Flushed)).unwrap();
    assert_eq!(fixture.notified(), 3);
    fixture.arm(false, false);
    fixture.arm(true, false);
    fixture.complete(&success(WcOpcode::Send)).unwrap();
    assert_eq!(fixture.notified(), 4);
    fixture.arm(true, false);
    fixture.arm(false, false);
    fixture.complete(&success(WcOpcode::Send)).unwrap();
    assert_eq!(fixture.notified(), 5);
}

/// A requested overrun ends the queue as a full ring does.
#[test]
fn an_overrun_on_request_raises_the_event_once() {
    let fixture = CqFixture::new(4, true);
    assert_eq!(fixture.complete(&success(WcOpcode::Send)), Ok(()));
    for _ in 0..2 {
        fixture.cq.overrun(&fixture.memory.space().view());
        assert_eq!(fixture.complete(&success(WcOpcode::Send)), Err(CqOverrun));
        assert_eq!(fixture.memory.load(fixture.events.state() + 8), 1);
    }
    assert_eq!(fixture.memory.load(fixture.guest.state() + 8), 1);
}

/// A destroyed queue accesses no memory.
#[test]
fn shut() {
    let fixture = CqFixture::new(4, true);
    fixture.arm(false, false);
    fixture.cq.shut();
    assert_eq!(fixture.complete(&success(WcOpcode::Send)), Err(CqOverrun));
    fixture.arm(false, true);
    assert_eq!((fixture.notified(), fixture.memory.load(fixture.events.state() + 8)), (0, 0));
    assert_eq!(fixture.memory.load(fixture.guest.state() + 8), 0);
    assert_eq!(fixture.entry(0), [0; 64]);
}

proptest! {
    /// Conformance 45: whatever the guest stores, published indices are valid, and the queue gets at most its size
    /// ahead of a valid consumer.
    #[test]
    fn hostile_guest(
        log in 0u32..4,
        steps in proptest::collection::vec((0u8..4, prop_oneof![0u32..32, any::<u32>()]), 1..100),
    ) {
        let fixture = CqFixture::new(1 << log, true);
        let mut published = 0;
        for (step, value) in steps {
            match step {
                0 => fixture.memory.store(fixture.guest.state() + 12, value),
                1 => fixture.consume(value),
                2 => fixture.arm(value % 2 == 0, value % 3 == 0),
                _ => {
                    if fixture.complete(&success(WcOpcode::Send)).is_ok() {
                        published = (published + 1) % (2 << log);
                    }
                    prop_assert_eq!(fixture.memory.load(fixture.guest.state() + 8), published);
                }
            }
        }
    }
}
