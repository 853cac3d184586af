//! States that no device has written: each is refused, and leaves a device that a driver can start.

use pvrdma_saved_state::{DeviceKind, Header, Reader, Record, Writer, pvrdma as saved};

use pvrdma_verbs::PauseHca;
use pvrdma_verbs::testing::gid;

use super::world::{Populated, World};
use crate::saved::RestoreError;
use crate::testing::QpInit;

fn decode<R: Record>(body: &[u8]) -> R {
    R::decode(body).unwrap()
}

/// Writes the records of a stream again, with a header.
fn rewrite(stream: &[u8], header: &Header, mut change: impl FnMut(Edit<'_, '_>)) -> Vec<u8> {
    let (mut input, mut output) = (stream, Vec::new());
    let mut reader = Reader::new(&mut input, u64::MAX).unwrap();
    let mut writer = Writer::new(&mut output, header, u64::MAX).unwrap();
    while let Some(record) = reader.next().unwrap() {
        change(Edit { kind: record.kind, body: record.body, writer: &mut writer });
    }
    writer.finish().unwrap();
    output
}

fn header() -> Header {
    Header::new(DeviceKind::Pvrdma, [0x52, 0x54, 0, 0, 0, 1])
}

/// A record that can be changed before it is written.
pub(super) struct Edit<'a, 'w> {
    pub(super) kind: u16,
    pub(super) body: &'a [u8],
    pub(super) writer: &'a mut Writer<'w>,
}

macro_rules! copy {
    ($edit:expr, $($message:ident)*) => {
        match $edit.kind {
            $(saved::$message::KIND => $edit.write(&decode::<saved::$message>($edit.body)),)*
            kind => panic!("kind {kind:#x}"),
        }
    };
}

impl<'a> Edit<'a, '_> {
    pub(super) fn write<R: Record>(&mut self, message: &R) {
        self.writer.write(message).unwrap();
    }

    /// Writes the record with another body, which must be a message of its kind.
    pub(super) fn copy(self, body: &'a [u8]) {
        let mut edit = Edit { body, ..self };
        copy!(
            edit,
            Device Table Pages AdapterPart AdapterTables EventRing WaitingEvents Context Pd Cq Srq Mr Qp Gid
        );
    }
}

/// Returns the stream with the records of a type changed. `change` returns `false` to leave a record out.
fn changed<R: Record>(stream: &[u8], mut change: impl FnMut(&mut R) -> bool) -> Vec<u8> {
    rewrite(stream, &header(), |mut edit| {
        if edit.kind != R::KIND {
            let body = edit.body;
            return edit.copy(body);
        }
        let mut message = decode::<R>(edit.body);
        if change(&mut message) {
            edit.write(&message);
        }
    })
}

/// Returns the stream with the first record of a type for which `change` returns `true` changed by it.
fn first<R: Record>(stream: &[u8], mut change: impl FnMut(&mut R) -> bool) -> Vec<u8> {
    let mut done = false;
    let stream = changed::<R>(stream, |message| {
        done = done || change(message);
        true
    });
    assert!(done, "no record was changed");
    stream
}

/// Checks that a state is refused with this message or a cause of it, and that a driver can start afterwards.
fn refused(stream: &[u8], message: &str) {
    let mut world = World::new();
    let error = world.move_on(stream).expect_err(message);
    assert_clean(&world);
    let mut causes = vec![error.to_string()];
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        causes.push(cause.to_string());
        source = cause.source();
    }
    assert!(causes.iter().any(|cause| cause.contains(message)), "{message}: {causes:?}");
}

/// Checks that a device keeps nothing and that a driver can start.
fn assert_clean(world: &World) {
    let core = world.test.device.core();
    assert_eq!(core.budget.used(), 0);
    assert!(!core.gate.is_open() && !core.gate.is_bus_master() && !core.hca.is_paused());
    let status = world.test.device.status();
    let counts = status.objects;
    assert_eq!([counts.contexts, counts.pds, counts.mrs, counts.cqs, counts.srqs, counts.qps], [0; 6]);
    assert_eq!(counts.gids, Some(0));
    let driver = world.probe();
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let cq = driver.create_cq(Some(&context), 4).unwrap();
    let mut qp = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    qp.to_init(7).unwrap();
    qp.destroy().unwrap();
}

fn populated() -> Vec<u8> {
    Populated::new().save()
}

#[test]
fn states_of_other_devices() {
    let saved = populated();
    let with = |header: Header| {
        rewrite(&saved, &header, |edit| {
            let body = edit.body;
            edit.copy(body);
        })
    };
    refused(&with(Header { device: DeviceKind::Vmxnet3, ..header() }), "another kind");
    refused(&with(Header { mac: [2; 6], ..header() }), "another MAC address");
    let device = |change: fn(&mut saved::Device)| {
        changed::<saved::Device>(&saved, |device| {
            change(device);
            true
        })
    };
    refused(&device(|device| device.version = 21), "another interface version");
    refused(&device(|device| device.roce = 1), "another GID type");
    refused(&device(|device| device.roce = 7), "GID type");
    refused(&device(|device| device.adapter = "rxe".to_owned()), "another adapter");
    refused(&device(|device| device.config_space[0] ^= 1), "another configuration space");
    refused(&device(|device| device.config_space.truncate(255)), "another configuration space");
}

#[test]
fn damaged_streams() {
    let saved = populated();
    for length in [0, 8, 11, 100, saved.len() / 2, saved.len() - 1] {
        refused(&saved[..length], "truncated");
    }
    let mut flipped = saved.clone();
    let middle = flipped.len() - 20;
    flipped[middle] ^= 1;
    assert!(World::new().move_on(&flipped).is_err());
}

#[test]
fn registers_and_limits() {
    let saved = populated();
    let device = |change: fn(&mut saved::Device)| {
        changed::<saved::Device>(&saved, |device| {
            change(device);
            true
        })
    };
    let limits = |change: fn(&mut saved::Limits)| {
        changed::<saved::Device>(&saved, |device| {
            change(device.limits.as_mut().unwrap());
            true
        })
    };
    let session = |change: fn(&mut saved::Session)| {
        changed::<saved::Device>(&saved, |device| {
            change(device.session.as_mut().unwrap());
            true
        })
    };
    refused(&device(|device| device.limits = None), "list of limits is missing");
    refused(&device(|device| device.session = None), "invalid phase");
    refused(&device(|device| device.phase = 0), "invalid phase");
    refused(&device(|device| device.phase = 3), "invalid phase");
    refused(&device(|device| device.phase = 1), "misplaced");
    refused(&device(|device| device.config_space[4] &= !4), "invalid phase");
    refused(&limits(|limits| limits.max_uar = 512), "size of BAR 2");
    refused(&limits(|limits| limits.max_qp = 100_000), "max_qp must be");
    refused(&limits(|limits| limits.max_qp_wr = 100), "lower limits");
    refused(&limits(|limits| limits.max_rd_atomic = 17), "lower limits");
    refused(&limits(|limits| limits.max_rd_atomic = 256), "limit of outstanding READs");
    refused(&limits(|limits| limits.gid_table = 0), "gid_table must be");
    refused(&session(|session| session.command_slot = 0), "address of a slot");
    refused(&session(|session| session.command_slot += 4), "address of a slot");
    refused(&session(|session| session.response_slot = u64::MAX - 7), "address of a slot");
    refused(&session(|session| session.version = 21), "invalid interface version");
    refused(&session(|session| session.command_slot = 1 << 40), "command slot");
    refused(&session(|session| session.response_slot = 1 << 40), "response slot");
}

/// The state of another host must not give a guest more than the configuration of this one does. In a hand-over, the
/// driver keeps the limits that it has read, although the configuration may have become lower since.
#[test]
fn limits_above_the_configuration() {
    let saved = populated();
    let stream = changed::<saved::Device>(&saved, |device| {
        device.limits.as_mut().unwrap().max_qp = 65_535;
        true
    });
    let world = World::new();
    let error = world.test.device.restore_alone(&mut &stream[..]).unwrap_err();
    assert!(error.to_string().contains("max_qp=65535"), "{error}");
    assert_clean(&world);
    world.test.device.restore_alone(&mut &saved[..]).unwrap();
    let world = World::new();
    world.test.device.restore(&mut &stream[..]).unwrap();
}

#[test]
fn records_at_the_wrong_place() {
    let saved = populated();
    refused(&changed::<saved::Device>(&saved, |_| false), "is at the place of");
    refused(&changed::<saved::AdapterTables>(&saved, |_| false), "missing or misplaced");
    refused(&changed::<saved::EventRing>(&saved, |_| false), "missing or misplaced");
    refused(&changed::<saved::Qp>(&saved, |_| false), "missing or misplaced");
    refused(&changed::<saved::Pd>(&saved, |_| false), "no protection domain");
    refused(&changed::<saved::Cq>(&saved, |_| false), "missing or misplaced");
    let twice = |kind| {
        rewrite(&saved, &header(), |edit| {
            let (its, body) = (edit.kind, edit.body);
            if its == kind {
                Edit { kind: its, body, writer: &mut *edit.writer }.copy(body);
            }
            edit.copy(body);
        })
    };
    refused(&twice(saved::Device::KIND), "second device");
    refused(&twice(saved::Context::KIND), "invalid handle");
    refused(&twice(saved::Pd::KIND), "invalid handle");
    refused(&twice(saved::EventRing::KIND), "pages of an event ring");
    refused(&twice(saved::AdapterTables::KIND), "adapter refuses");
    refused(
        &first::<saved::Table>(&saved, |table| {
            table.kind = 0;
            true
        }),
        "kind of a table",
    );
    refused(
        &first::<saved::Table>(&saved, |table| {
            table.kind = 9;
            true
        }),
        "kind of a table",
    );
}

#[test]
fn lists_of_pages() {
    let saved = populated();
    let pages = |change: fn(&mut saved::Pages)| {
        first::<saved::Pages>(&saved, |pages| {
            change(pages);
            true
        })
    };
    refused(&pages(|pages| pages.counts.push(1)), "list of pages");
    refused(&pages(|pages| pages.addresses[0] += 1), "run of pages");
    refused(&pages(|pages| pages.addresses[0] = 0), "run of pages");
    refused(&pages(|pages| pages.counts[0] = 0), "run of pages");
    refused(&pages(|pages| pages.counts[0] = u32::MAX), "run of pages");
    refused(&pages(|pages| pages.counts[0] = 262_145), "run of pages");
    refused(&pages(|pages| pages.addresses[0] = !0xfff), "run of pages");
    refused(&pages(|pages| pages.addresses[0] = 1 << 40), "ring of the saved state is not mapped");
    // A driver can give an event ring at most 512 pages.
    refused(&pages(|pages| pages.counts[0] = 513), "pages of an event ring");
    // A list that no object follows, at the end of the stream.
    refused(&changed::<saved::Gid>(&changed::<saved::Qp>(&saved, |_| false), |_| false), "misplaced");
}

#[test]
fn event_rings() {
    let saved = populated();
    refused(
        &first::<saved::EventRing>(&saved, |ring| {
            ring.tail = Some(1 << 20);
            true
        }),
        "event rings",
    );
    let events = |change: fn(&mut saved::WaitingEvents)| {
        first::<saved::WaitingEvents>(&saved, |events| {
            change(events);
            true
        })
    };
    refused(&events(|events| events.kinds[0] = 6), "invalid event");
    refused(&events(|events| events.subjects[0] = 65_536), "invalid event");
    refused(&events(|events| events.subjects.push(7)), "list of events");
    refused(&events(|events| events.kinds.clear()), "invalid event");
    for (kind, subject) in [(0, 1 << 24), (9, 2), (14, 1 << 24)] {
        let stream = first::<saved::WaitingEvents>(&saved, |events| {
            (events.kinds[0], events.subjects[0]) = (kind, subject);
            true
        });
        refused(&stream, "invalid event");
    }
    refused(
        &changed::<saved::WaitingEvents>(&saved, |events| {
            if events.kinds.is_empty() {
                events.kinds = events.subjects.clone();
            }
            true
        }),
        "invalid event",
    );
}

/// A stream may repeat a record for as long as the limit of its length permits. What is kept of it would be many times
/// as long as the stream, so the first record too many is refused.
#[test]
fn records_that_are_repeated_without_end() {
    let saved = populated();
    let repeated = |kind| {
        rewrite(&saved, &header(), |edit| {
            let (its, body) = (edit.kind, edit.body);
            let times = if its == kind { 1000 } else { 1 };
            (0..times).for_each(|_| Edit { kind: its, body, writer: &mut *edit.writer }.copy(body));
        })
    };
    for kind in [saved::WaitingEvents::KIND, saved::EventRing::KIND] {
        let stream = repeated(kind);
        let (world, mut input) = (World::new(), &stream[..]);
        world.test.device.restore(&mut input).unwrap_err();
        let read = stream.len() - input.len();
        assert!(read < saved.len(), "{read} of {} bytes were read", stream.len());
        assert_clean(&world);
    }
}

/// Contexts, domains and completion queues.
#[test]
fn small_objects() {
    let saved = populated();
    let context = |change: fn(&mut saved::Context)| {
        first::<saved::Context>(&saved, |context| {
            change(context);
            true
        })
    };
    refused(&context(|context| context.handle = 0), "invalid handle");
    refused(&context(|context| context.handle = 1 << 20), "invalid handle");
    refused(&context(|context| context.uar_page = 0), "doorbell page");
    refused(&context(|context| context.uar_page = 1024), "doorbell page");
    refused(
        &changed::<saved::Context>(&saved, |context| {
            context.uar_page = 5;
            true
        }),
        "doorbell page",
    );
    refused(
        &first::<saved::Pd>(&saved, |pd| {
            pd.owner = 77;
            true
        }),
        "no context 77",
    );
    refused(
        &first::<saved::Pd>(&saved, |pd| {
            pd.handle = u32::MAX;
            true
        }),
        "invalid handle",
    );
    let cq = |change: fn(&mut saved::Cq)| {
        first::<saved::Cq>(&saved, |cq| {
            change(cq);
            true
        })
    };
    refused(&cq(|cq| cq.owner = 77), "no context 77");
    refused(&cq(|cq| cq.entries = 63), "number of CQ entries");
    refused(&cq(|cq| cq.entries = 1 << 30), "number of CQ entries");
    refused(&cq(|cq| cq.entries = 1024), "number of pages");
    refused(&cq(|cq| cq.tail = Some(128)), "no ring of 64 elements is at index 0x80");
    refused(&cq(|cq| cq.tail = None), "number of pages");
    refused(&cq(|cq| cq.armed = 3), "state of a completion queue");
    let late = cq(|cq| cq.unheard = Some(saved::Unheard { announced: true, delay: 500_000_001 }));
    refused(&late, "delay of notifications");
}

/// Shared receive queues and memory regions.
#[test]
fn queues_and_regions() {
    let saved = populated();
    let srq = |change: fn(&mut saved::Srq)| {
        first::<saved::Srq>(&saved, |srq| {
            change(srq);
            true
        })
    };
    refused(&srq(|srq| srq.pd = 99), "no protection domain 99");
    refused(&srq(|srq| srq.max_wr = 15), "number of SRQ requests");
    refused(&srq(|srq| srq.max_sge = 17), "number of SGEs");
    refused(&srq(|srq| srq.limit = 17), "SRQ limit");
    refused(&srq(|srq| srq.ring.as_mut().unwrap().next = 32), "at index 0x20");
    refused(&srq(|srq| srq.ring.as_mut().unwrap().head = 33), "at index");
    refused(&srq(|srq| srq.ring.as_mut().unwrap().broken = 9), "broken ring");
    let mr = |kind: saved::MrKind, change: fn(&mut saved::Mr)| {
        first::<saved::Mr>(&saved, |mr| {
            let is = mr.kind() == kind;
            if is {
                change(mr);
            }
            is
        })
    };
    refused(&mr(saved::MrKind::User, |mr| mr.length = 0), "memory region length");
    refused(&mr(saved::MrKind::User, |mr| mr.length += 4096), "number of pages");
    refused(&mr(saved::MrKind::User, |mr| mr.start = u64::MAX), "memory region length");
    refused(&mr(saved::MrKind::User, |mr| mr.kind = 0), "kind of a memory region");
    refused(&mr(saved::MrKind::User, |mr| mr.kind = 4), "kind of a memory region");
    refused(&mr(saved::MrKind::User, |mr| mr.set_kind(saved::MrKind::Dma)), "field of a memory region");
    refused(&mr(saved::MrKind::User, |mr| mr.access = 16), "field of a memory region");
    refused(&mr(saved::MrKind::User, |mr| mr.max_pages = 1), "field of a memory region");
    refused(&mr(saved::MrKind::Dma, |mr| mr.access = 4), "field of a memory region");
    refused(&mr(saved::MrKind::FastRegister, |mr| mr.start = 1), "field of a memory region");
    // A process must not get a key for all of memory, or a region that work requests fill.
    refused(&mr(saved::MrKind::Dma, |mr| mr.pd = 1), "belongs to another context");
    refused(&mr(saved::MrKind::FastRegister, |mr| mr.pd = 1), "belongs to another context");
    refused(&mr(saved::MrKind::FastRegister, |mr| mr.max_pages = 129), "number of pages");
    refused(&mr(saved::MrKind::FastRegister, |mr| mr.max_pages = 0), "number of pages");
}

#[test]
fn queue_pairs() {
    let saved = populated();
    let qp = |kind: saved::QpType, change: fn(&mut saved::Qp)| {
        first::<saved::Qp>(&saved, |qp| {
            let is = qp.qp_type() == kind && qp.send_cq.is_some();
            if is {
                change(qp);
            }
            is
        })
    };
    let (rc, gsi) = (saved::QpType::Rc, saved::QpType::Gsi);
    refused(&qp(rc, |qp| qp.qpn += 1), "QPN");
    refused(&qp(rc, |qp| qp.qpn |= 1 << 24), "QPN");
    refused(&qp(rc, |qp| qp.handle = 0), "handle");
    refused(&qp(rc, |qp| (qp.handle, qp.qpn) = (1, 1)), "refused");
    refused(&qp(gsi, |qp| qp.set_qp_type(saved::QpType::Ud)), "QPN");
    refused(&qp(rc, |qp| qp.set_qp_type(saved::QpType::Gsi)), "general services");
    refused(&qp(rc, |qp| qp.qp_type = 0), "QP type");
    refused(&qp(rc, |qp| qp.qp_type = 4), "QP type");
    refused(&qp(rc, |qp| qp.pd = 99), "no protection domain 99");
    refused(&qp(rc, |qp| qp.pd = 0), "belongs to another context");
    refused(&qp(rc, |qp| qp.send_cq = Some(99)), "no completion queue 99");
    refused(&qp(rc, |qp| qp.recv_cq = Some(0)), "belongs to another context");
    refused(&qp(rc, |qp| (qp.has_srq, qp.srq) = (true, Some(99))), "no shared receive queue 99");
    refused(&qp(rc, |qp| qp.has_srq = true), "number of pages");
    refused(&qp(rc, |qp| qp.max_send_wr = 3), "number of requests");
    refused(&qp(rc, |qp| qp.max_recv_sge = 100), "number of SGEs");
    refused(&qp(rc, |qp| qp.send_pages += 1), "number of pages");
    refused(&qp(rc, |qp| qp.send_pages = 1 << 16), "number of pages");
    refused(&qp(rc, |qp| qp.send_pages -= 1), "number of pages");
    refused(&qp(rc, |qp| qp.send_ring.as_mut().unwrap().next = 128), "at index 0x80");
    refused(&qp(rc, |qp| qp.recv_ring.as_mut().unwrap().head = 30), "at index");
    refused(&qp(rc, |qp| qp.send_ring.as_mut().unwrap().broken = 4), "state of a ring");
    let gid = |change: fn(&mut saved::Gid)| {
        first::<saved::Gid>(&saved, |gid| {
            change(gid);
            true
        })
    };
    refused(&gid(|gid| gid.index = 256), "GID index");
    refused(&gid(|gid| gid.gid.truncate(15)), "invalid GID");
    refused(&gid(|gid| gid.vlan = 4095), "VLAN");
    refused(&gid(|gid| gid.vlan = 1 << 16), "VLAN");
}

/// The adapter refuses its tables, an object, the memory of a region, or a GID.
#[test]
fn refusals_of_the_adapter() {
    let saved = populated();
    let part = |length: usize| {
        first::<saved::AdapterPart>(&saved, |part| {
            part.bytes.resize(length, 0);
            true
        })
    };
    refused(&part(3), "adapter refuses");
    refused(&part(5), "adapter refuses");
    let mut world = World::new();
    world.hca().refuse_next();
    assert!(matches!(world.test.device.restore(&mut saved.as_slice()), Err(RestoreError::Object { .. })));
    assert_clean(&world);
    // The memory of a region.
    world.test.device.restore(&mut saved.as_slice()).unwrap();
    world.hca().refuse_next();
    assert!(matches!(world.test.device.finish_restore(), Err(RestoreError::Object { kind: "memory region", .. })));
    assert_clean(&world);
    world.move_on(&saved).unwrap();
    // A GID.
    let mut world = World::new();
    world.probe().bind_gid(0, gid(1)).unwrap();
    let saved = world.save();
    world.move_on(&saved).unwrap();
    world.test.device.restore(&mut saved.as_slice()).unwrap();
    world.hca().refuse_next();
    assert!(matches!(world.test.device.finish_restore(), Err(RestoreError::Object { kind: "GID", .. })));
    assert_clean(&world);
}
