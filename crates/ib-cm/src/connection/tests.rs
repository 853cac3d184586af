//! Both roles on virtual time, against each other and against messages that do not fit.

use pvrdma_verbs_types::Psn;

use super::*;

const START: Duration = Duration::from_secs(100);

fn req() -> Req {
    Req { local_id: 11, qpn: Qpn::new(0x111), service_id: 0x0106_1234, private_data: [1; 92], ..Req::default() }
}

fn rep() -> Rep {
    Rep { qpn: Qpn::new(0x222), starting_psn: Psn::new(5), private_data: [2; 196], ..Rep::default() }
}

/// The next datagram of an end, as its peer receives it.
fn sent(end: &mut Connection) -> Option<Mad> {
    end.poll_transmit().map(|bytes| Mad::parse(&bytes).unwrap())
}

fn message(end: &mut Connection) -> Message {
    sent(end).unwrap().message
}

/// An active end, and a passive one that has received its REQ.
fn begun() -> (Connection, Connection) {
    let mut active = Connection::outgoing(START, 0xabc, req());
    let mad = sent(&mut active).unwrap();
    let Message::Req(received) = mad.message else { panic!("{mad:?}") };
    assert_eq!(*received, req());
    (active, Connection::incoming(START, 22, mad.transaction, *received))
}

/// Delivers the message that `from` sends to `to`.
fn pass(from: &mut Connection, to: &mut Connection) -> Option<Event> {
    to.handle_message(START, &sent(from).unwrap())
}

fn established() -> (Connection, Connection) {
    let (mut active, mut passive) = begun();
    passive.accept(START, rep());
    let accepted = pass(&mut passive, &mut active);
    let expected = Rep { local_id: 22, remote_id: 11, ..rep() };
    assert_eq!(accepted, Some(Event::Accepted(Box::new(expected))));
    active.confirm();
    assert_eq!(pass(&mut active, &mut passive), Some(Event::Established));
    assert_eq!([active.state(), passive.state()], [State::Established; 2]);
    assert_eq!([active.poll_timeout(), passive.poll_timeout()], [None; 2]);
    assert_eq!((active.peer_id(), passive.peer_id()), (Some(22), Some(11)));
    (active, passive)
}

/// Lets time pass to the next deadline.
fn tick(end: &mut Connection) -> (Duration, Option<Event>) {
    let now = end.poll_timeout().unwrap();
    assert_eq!(end.handle_timeout(now - Duration::from_nanos(1)), None);
    (now, end.handle_timeout(now))
}

#[test]
fn from_request_to_end_in_both_roles() {
    for active_ends in [true, false] {
        let (active, passive) = established();
        let (mut first, mut second) = if active_ends { (active, passive) } else { (passive, active) };
        first.disconnect(START);
        let dreq = sent(&mut first).unwrap();
        assert_eq!(second.handle_message(START, &dreq), Some(Event::Disconnected));
        let drep = sent(&mut second).unwrap();
        assert_eq!(drep.transaction, dreq.transaction);
        assert_eq!(first.handle_message(START, &drep), None);
        for end in [&mut first, &mut second] {
            assert_eq!((end.state(), end.poll_timeout()), (State::TimeWait, Some(START + TIME_WAIT)));
            assert_eq!(tick(end), (START + TIME_WAIT, None));
            assert_eq!((end.state(), end.poll_timeout(), sent(end)), (State::Done, None, None));
        }
    }
}

#[test]
fn a_message_without_answer_is_repeated_15_times() {
    let (active, _) = begun();
    let (_, mut passive) = begun();
    passive.accept(START, rep());
    sent(&mut passive);
    let (mut ending, _) = established();
    ending.disconnect(START);
    let dreq = message(&mut ending);
    for mut end in [active, passive, ending] {
        let first = end.last.clone().unwrap();
        for repetition in 1..=u32::from(MAX_REPEATS) {
            assert_eq!(tick(&mut end), (START + REPEAT_AFTER * repetition, None));
            assert_eq!(message(&mut end), first);
        }
        assert_eq!(tick(&mut end).1, Some(Event::TimedOut));
        // The peer is told, except about a connection that is ended anyway.
        let last = sent(&mut end).map(|mad| mad.message);
        if first == dreq {
            assert_eq!(last, None);
        } else {
            assert!(matches!(last, Some(Message::Rej(rej)) if rej.reason == RejectReason::TIMEOUT));
        }
        assert_eq!(end.state(), State::TimeWait);
    }
}

#[test]
fn an_undecided_owner_asks_for_time_and_the_peer_waits() {
    let (mut active, mut passive) = begun();
    let (asked, event) = tick(&mut passive);
    assert_eq!((asked, event), (START + Duration::from_secs(2), None));
    let mad = sent(&mut passive).unwrap();
    assert_eq!(active.handle_message(asked, &mad), None);
    let until = active.poll_timeout().unwrap();
    assert_eq!(until, asked + service_timeout(ASKED_FOR) + REPEAT_AFTER);
    // It is asked again in time.
    let (again, _) = tick(&mut passive);
    assert!(again < until && matches!(message(&mut passive), Message::Mra(_)));
    // A REQ that was repeated nevertheless gets the same answer.
    assert_eq!(
        passive.handle_message(again, &Mad { transaction: 0xabc, message: Message::Req(Box::new(req())) }),
        None
    );
    assert!(matches!(message(&mut passive), Message::Mra(mra) if mra.answered == MessageKind::Req));
    passive.accept(again, rep());
    assert!(matches!(pass(&mut passive, &mut active), Some(Event::Accepted(_))));
    // The active end may hesitate as well.
    tick(&mut active);
    let mad = sent(&mut active).unwrap();
    assert!(matches!(&mad.message, Message::Mra(mra) if mra.answered == MessageKind::Rep));
    let before = passive.poll_timeout();
    passive.handle_message(again, &mad);
    assert!(passive.poll_timeout() > before);
}

#[test]
fn lost_answers_are_given_again() {
    let (mut active, mut passive) = begun();
    let request = Mad { transaction: 0xabc, message: Message::Req(Box::new(req())) };
    // Before the decision there is nothing to repeat.
    assert_eq!((passive.handle_message(START, &request), sent(&mut passive)), (None, None));
    passive.accept(START, rep());
    let first = sent(&mut passive).unwrap();
    assert_eq!(passive.handle_message(START, &request), None);
    assert_eq!(sent(&mut passive).unwrap(), first);
    assert!(active.handle_message(START, &first).is_some());
    // The REP before the decision, and behind a lost RTU.
    assert_eq!((active.handle_message(START, &first), sent(&mut active)), (None, None));
    active.confirm();
    let rtu = sent(&mut active);
    assert_eq!(active.handle_message(START, &first), None);
    assert_eq!(sent(&mut active), rtu);
    // A DREQ whose DREP was lost.
    passive.handle_message(START, &rtu.unwrap());
    active.disconnect(START);
    let dreq = sent(&mut active).unwrap();
    assert_eq!(passive.handle_message(START, &dreq), Some(Event::Disconnected));
    let drep = sent(&mut passive);
    assert_eq!(passive.handle_message(START, &dreq), None);
    assert_eq!(sent(&mut passive), drep);
}

#[test]
fn data_replaces_a_lost_rtu() {
    let (mut active, mut passive) = begun();
    assert!(!passive.data_arrived());
    passive.accept(START, rep());
    pass(&mut passive, &mut active);
    active.confirm();
    assert!(passive.data_arrived() && !passive.data_arrived());
    assert_eq!((passive.state(), pass(&mut active, &mut passive)), (State::Established, None));
}

#[test]
fn rejections_carry_reason_and_private_data() {
    let (mut active, mut passive) = begun();
    passive.reject(START, RejectReason::CONSUMER, b"no");
    let rej = sent(&mut passive).unwrap();
    let Some(Event::Rejected(rejected)) = active.handle_message(START, &rej) else { panic!("{rej:?}") };
    assert_eq!((rejected.reason, &rejected.private_data[..3]), (RejectReason::CONSUMER, &b"no\0"[..]));
    // It is repeated for a repeated REQ.
    passive.handle_message(START, &Mad { transaction: 0xabc, message: Message::Req(Box::new(req())) });
    assert_eq!(sent(&mut passive), Some(rej.clone()));
    // A second one says nothing new.
    assert_eq!((active.handle_message(START, &rej), active.state()), (None, State::TimeWait));

    let (mut active, mut passive) = begun();
    passive.accept(START, rep());
    pass(&mut passive, &mut active);
    active.reject(START, RejectReason::CONSUMER, &[7; 200]);
    let Some(Event::Rejected(rejected)) = pass(&mut active, &mut passive) else { panic!("{passive:?}") };
    assert_eq!(*rejected.private_data, [7; 148]);
}

#[test]
fn crossing_dreqs_end_both() {
    let (mut active, mut passive) = established();
    active.disconnect(START);
    passive.disconnect(START);
    let (one, two) = (sent(&mut active).unwrap(), sent(&mut passive).unwrap());
    assert_eq!((active.handle_message(START, &two), passive.handle_message(START, &one)), (None, None));
    assert_eq!([active.state(), passive.state()], [State::TimeWait; 2]);
    assert!(matches!((message(&mut active), message(&mut passive)), (Message::Drep(_), Message::Drep(_))));
}

#[test]
fn a_dreq_before_the_rtu_ends_the_connection() {
    let (mut active, mut passive) = begun();
    passive.accept(START, rep());
    pass(&mut passive, &mut active);
    active.confirm();
    sent(&mut active);
    active.disconnect(START);
    assert_eq!(pass(&mut active, &mut passive), Some(Event::Disconnected));
}

#[test]
fn messages_of_others_are_ignored() {
    let messages = |local_id: u32, remote_id: u32| {
        let private_data = [0; 224];
        [
            Message::Rtu(Rtu { local_id, remote_id, private_data }),
            Message::Drep(Drep { local_id, remote_id, private_data }),
            Message::Dreq(Dreq { local_id, remote_id, remote_qpn: Qpn::new(0x222), private_data: [0; 220] }),
            Message::Rep(Rep { local_id, remote_id, ..rep() }),
            Message::Mra(Mra {
                local_id,
                remote_id,
                answered: MessageKind::Rep,
                service_timeout: 31,
                private_data: [0; 222],
            }),
            Message::Rej(Rej {
                local_id,
                remote_id,
                rejected: MessageKind::Rep,
                reason: RejectReason(1),
                info_len: 0,
                info: [0; 72],
                private_data: [0; 148],
            }),
        ]
    };
    // Each ID is another's.
    for (local_id, remote_id) in [(11, 23), (12, 22), (0, 23)] {
        for message in messages(local_id, remote_id) {
            let (_, mut passive) = begun();
            passive.accept(START, rep());
            sent(&mut passive);
            let before = passive.poll_timeout();
            assert_eq!(passive.handle_message(START, &Mad { transaction: 0xabc, message }), None);
            assert_eq!((passive.state(), passive.poll_timeout(), sent(&mut passive)), (State::RepSent, before, None));
        }
    }
    // A REQ of another transaction, and a DREQ for another QP.
    let (_, mut passive) = established();
    let dreq = Dreq { local_id: 11, remote_id: 22, remote_qpn: Qpn::new(0x223), private_data: [0; 220] };
    for message in [Message::Req(Box::new(req())), Message::Dreq(dreq)] {
        assert_eq!(passive.handle_message(START, &Mad { transaction: 1, message }), None);
        assert_eq!((passive.state(), sent(&mut passive)), (State::Established, None));
    }
}

/// Every message in every state: no state is left that does not lead on, and nothing is sent but answers.
#[test]
fn every_message_in_every_state() {
    let states = || {
        let (active, passive) = begun();
        let (mut rep_sent, mut rep_received) = (passive.clone(), active.clone());
        rep_sent.accept(START, rep());
        pass(&mut rep_sent, &mut rep_received);
        let (up, mut ending) = established();
        ending.disconnect(START);
        let mut over = up.clone();
        over.disconnect(START);
        over.handle_message(START, &drep_to_active());
        let mut done = over.clone();
        tick(&mut done);
        [active, rep_received, passive, rep_sent, up, ending, over, done]
    };
    assert_eq!(
        states().map(|end| end.state()),
        [
            State::ReqSent,
            State::RepReceived,
            State::ReqReceived,
            State::RepSent,
            State::Established,
            State::DreqSent,
            State::TimeWait,
            State::Done,
        ]
    );
    for which in 0..8 {
        for attribute in 0x10..=0x16 {
            let mut end = states()[which].clone();
            let mut body = [0; 232];
            body[..4].copy_from_slice(&end.peer_id().unwrap_or(22).to_be_bytes());
            if attribute != 0x10 {
                body[4..8].copy_from_slice(&end.local_id().to_be_bytes());
            }
            let mad = Mad { transaction: 0xabc, message: Message::from_bytes(attribute, &body).unwrap() };
            end.outgoing = None;
            let before = end.state();
            let event = end.handle_message(START, &mad);
            let after = end.state();
            let moves = matches!(
                (before, attribute, after),
                (State::ReqSent, 0x13, State::RepReceived)
                    | (State::RepSent, 0x14, State::Established)
                    | (
                        State::ReqSent | State::RepReceived | State::ReqReceived | State::RepSent,
                        0x12,
                        State::TimeWait
                    )
                    | (State::DreqSent, 0x16, State::TimeWait)
            );
            assert!(moves || before == after, "{before:?} {attribute:#x} {after:?}");
            assert_eq!(event.is_some(), moves && before != State::DreqSent, "{before:?} {attribute:#x}");
            let waits = matches!(after, State::Established | State::Done);
            assert_eq!(end.poll_timeout().is_none(), waits, "{before:?} {attribute:#x}");
        }
    }
}

fn drep_to_active() -> Mad {
    let drep = Drep { local_id: 22, remote_id: 11, private_data: [0; 224] };
    Mad { transaction: 0xabc, message: Message::Drep(drep) }
}

/// Random losses: connections are established and ended nevertheless, on both sides.
#[test]
fn connections_over_a_network_that_loses_datagrams() {
    for seed in 0..500_u64 {
        let mut random = seed;
        let mut lost = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random >> 33 & 3 == 0
        };
        let (mut active, mut passive) = begun();
        let mut now = START;
        passive.accept(now, rep());
        let mut events = Vec::new();
        while !(active.state() == State::Done && passive.state() == State::Done) {
            while let Some(mad) = sent(&mut passive).filter(|_| !lost()) {
                events.extend(active.handle_message(now, &mad));
                active.confirm();
                // The end whose time has passed is forgotten.
                let answer = (active.state() == State::Done).then(|| answer_without_connection(&mad)).flatten();
                if let Some(answer) = answer.filter(|_| !lost()) {
                    passive.handle_message(now, &Mad::parse(&answer).unwrap());
                }
            }
            while let Some(mad) = sent(&mut active).filter(|_| !lost()) {
                events.extend(passive.handle_message(now, &mad));
            }
            if passive.state() == State::Established {
                passive.disconnect(now);
                continue;
            }
            let next = [active.poll_timeout(), passive.poll_timeout()].into_iter().flatten().min();
            now = next.unwrap_or_else(|| panic!("seed {seed}: {active:?} {passive:?}"));
            events.extend(active.handle_timeout(now));
            events.extend(passive.handle_timeout(now));
        }
        let count = |wanted: &Event| events.iter().filter(|event| *event == wanted).count();
        assert_eq!((count(&Event::Established), count(&Event::Disconnected)), (1, 1), "seed {seed}");
        assert_eq!(count(&Event::TimedOut), 0, "seed {seed}");
        assert!(now < START + Duration::from_secs(120), "seed {seed}");
    }
}

/// Attack: a peer repeats its DREQ to keep an ended connection, and its memory.
#[test]
fn repeated_dreqs_are_answered_and_do_not_delay_the_end() {
    let (mut active, mut passive) = established();
    active.disconnect(START);
    let dreq = sent(&mut active).unwrap();
    assert_eq!(passive.handle_message(START, &dreq), Some(Event::Disconnected));
    let drep = sent(&mut passive).unwrap();
    for second in 1..10 {
        assert_eq!(passive.handle_message(START + Duration::from_secs(second), &dreq), None);
        assert_eq!((sent(&mut passive).as_ref(), passive.poll_timeout()), (Some(&drep), Some(START + TIME_WAIT)));
    }
    assert_eq!(tick(&mut passive).1, None);
    assert_eq!(passive.state(), State::Done);
}

#[test]
fn an_unknown_dreq_is_confirmed_and_nothing_else_is_answered() {
    let (mut active, _) = established();
    active.disconnect(START);
    let answer = answer_without_connection(&sent(&mut active).unwrap()).unwrap();
    assert_eq!(active.handle_message(START, &Mad::parse(&answer).unwrap()), None);
    assert_eq!((active.state(), answer_without_connection(&drep_to_active())), (State::TimeWait, None));
}

#[test]
fn a_request_that_is_given_up_is_found_by_the_id_of_its_sender() {
    let (mut active, mut passive) = begun();
    active.reject(START, RejectReason::TIMEOUT, &[]);
    let rej = sent(&mut active).unwrap();
    assert_eq!((rej.message.destination(), rej.message.source()), (Some(0), 11));
    assert!(matches!(passive.handle_message(START, &rej), Some(Event::Rejected(_))));
    let (_, mut other) = begun();
    other.peer = Some(Peer { id: 12, qpn: Qpn::new(1) });
    assert_eq!((other.handle_message(START, &rej), other.state()), (None, State::ReqReceived));
}
