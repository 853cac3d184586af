//! Random operations in both directions over a pipe that splits and delays bytes at random. Every byte arrives where it
//! belongs and nowhere else, in order and once.

use proptest::prelude::*;
use pvrdma_iwarp::{Negotiated, Role, Rtr, Tuning};
use pvrdma_verbs_types::{Invalidate, SendData, SendFlags, SendOp, SendWr, Sge, WcStatus};

use crate::host::{Ended, Host};
use crate::pair::{End, Pair, Random, read, request, send, sge, write};

/// Memory of an end: data to send, areas that the peer writes, and areas for receives and READs.
pub(crate) const AREA: usize = 200_000;
pub(crate) const SOURCE: usize = 0;
pub(crate) const TARGET: usize = AREA;
pub(crate) const LANDING: usize = 2 * AREA;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Send { solicited: bool, invalidate: bool },
    Write,
    Read,
    LocalInvalidate,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    operation: Operation,
    length: usize,
    sges: usize,
    fence: bool,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let operation = prop_oneof![
        4 => any::<(bool, bool)>().prop_map(|(solicited, invalidate)| Operation::Send { solicited, invalidate }),
        3 => Just(Operation::Write),
        3 => Just(Operation::Read),
        1 => Just(Operation::LocalInvalidate),
    ];
    let length = prop_oneof![3 => 0..200_usize, 3 => 0..6000_usize, 1 => 0..20_000_usize];
    (operation, length, 1..17_usize, any::<bool>()).prop_map(|(operation, length, sges, fence)| Step {
        operation,
        length,
        sges,
        fence,
    })
}

/// One direction of a connection: the requests of an end, and their expected effects.
pub(crate) struct Plan {
    pub(crate) requests: Vec<SendWr>,
    /// Receives that the peer posts.
    pub(crate) receives: Vec<Vec<Sge>>,
    expected: Vec<Ended>,
    received: Vec<(u32, bool, Option<u32>)>,
    invalidated_here: Vec<u32>,
    invalidated_there: Vec<u32>,
}

/// Cuts a range into `count` elements.
fn cut(start: usize, length: usize, count: usize, random: &mut Random) -> Vec<Sge> {
    let mut cuts: Vec<usize> = (1..count).map(|_| random.up_to(length)).collect();
    cuts.extend([0, length]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| sge(start + pair[0], pair[1] - pair[0])).collect()
}

/// Plans the requests of `from`, and applies them to images of both memories.
pub(crate) fn plan(
    steps: &[Step],
    from: &mut [u8],
    to: &mut [u8],
    at: &mut [[usize; 2]; 2],
    random: &mut Random,
) -> Plan {
    let [[here_target, here_landing], [there_target, there_landing]] = at;
    let mut plan = Plan {
        requests: vec![],
        receives: vec![],
        expected: vec![],
        received: vec![],
        invalidated_here: vec![],
        invalidated_there: vec![],
    };
    for (number, step) in (1..).zip(steps) {
        let key = u32::try_from(number << 8).unwrap();
        let room = LANDING + AREA - *here_landing.max(there_landing);
        let length = step.length.min(room).min(TARGET + AREA - *here_target.max(there_target));
        let source = SOURCE + random.up_to(AREA - length);
        let mut byte_len = 0;
        let mut wr = match step.operation {
            Operation::Send { solicited, invalidate } => {
                let spare = random.up_to(3.min(room - length));
                let sges = cut(*there_landing, length + spare, random.up_to(15) + 1, random);
                to[*there_landing..*there_landing + length].copy_from_slice(&from[source..source + length]);
                *there_landing += length + spare;
                plan.receives.push(sges);
                let data = if invalidate { SendData::Invalidate(key) } else { SendData::None };
                plan.received.push((u32::try_from(length).unwrap(), solicited, invalidate.then_some(key)));
                plan.invalidated_there.extend(invalidate.then_some(key));
                let mut wr = send(number, cut(source, length, step.sges, random));
                wr.op = SendOp::Send { data, to: None };
                wr.flags.set(SendFlags::SOLICITED, solicited);
                wr
            }
            Operation::Write => {
                to[*there_target..*there_target + length].copy_from_slice(&from[source..source + length]);
                let wr = write(number, *there_target, cut(source, length, step.sges, random));
                *there_target += length;
                wr
            }
            Operation::Read => {
                from[*here_landing..*here_landing + length].copy_from_slice(&to[source..source + length]);
                let wr = read(number, source, cut(*here_landing, length, step.sges, random));
                *here_landing += length;
                byte_len = u32::try_from(length).unwrap();
                wr
            }
            Operation::LocalInvalidate => {
                plan.invalidated_here.push(key);
                request(number, SendOp::LocalInvalidate(Invalidate { key }), vec![])
            }
        };
        wr.flags.set(SendFlags::FENCE, step.fence);
        plan.expected.push(Ended { wr_id: number, status: WcStatus::Success, byte_len });
        plan.requests.push(wr);
    }
    plan
}

/// Moves bytes in random pieces, and posts requests and receives at random times, until nothing moves.
fn run(pair: &mut Pair, plans: &[Plan; 2], random: &mut Random) {
    let mut posted = [0; 2];
    let mut receives = [0; 2];
    let mut wires = [Vec::new(), Vec::new()];
    let mut idle = 0;
    while idle < 50 {
        let here = random.up_to(1);
        let there = 1 - here;
        let mut moved = false;
        let end: &mut End = &mut pair.0[here];
        while posted[here] < plans[here].requests.len() && end.stream.has_room() && random.up_to(3) > 0 {
            end.post(plans[here].requests[posted[here]].clone());
            (posted[here], moved) = (posted[here] + 1, true);
        }
        while receives[here] < plans[there].receives.len() && random.up_to(3) > 0 {
            end.host.post_receive(0, plans[there].receives[receives[here]].clone());
            (receives[here], moved) = (receives[here] + 1, true);
        }
        for _ in 0..random.up_to(8) {
            moved |= end.transmit();
        }
        // TCP takes a few bytes or many.
        let most = [1, 100, 100_000][random.up_to(2)];
        let bytes = end.take(random.up_to(most));
        wires[here].extend(bytes);
        let arrives = random.up_to(most).min(wires[here].len());
        let bytes: Vec<u8> = wires[here].drain(..arrives).collect();
        pair.0[there].deliver(&bytes);
        let quiet = pair.0[here].outbox.is_empty() && wires[here].is_empty() && !moved;
        idle = if quiet { idle + 1 } else { 0 };
    }
}

/// Returns `true` if these requests make their end send something first.
pub(crate) fn first_sends(steps: &[Step]) -> bool {
    steps.first().is_some_and(|step| !matches!(step.operation, Operation::LocalInvalidate))
}

/// Checks the completions at both ends of a plan, and the keys that were invalidated at its own end.
pub(crate) fn check(plan: &Plan, other: &Plan, here: &Host, there: &Host) -> Result<(), TestCaseError> {
    prop_assert_eq!(&here.sent, &plan.expected);
    let received = there.received.iter().filter_map(|(_, received)| *received);
    let received: Vec<_> =
        received.map(|received| (received.length, received.solicited, received.invalidated)).collect();
    prop_assert_eq!(&received, &plan.received);
    let mut invalidated = plan.invalidated_here.clone();
    invalidated.extend(&other.invalidated_there);
    invalidated.sort_unstable();
    let mut found = here.invalidated.clone();
    found.sort_unstable();
    prop_assert_eq!(found, invalidated);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives(
        steps in [prop::collection::vec(step(), 0..40), prop::collection::vec(step(), 0..40)],
        seed in any::<u64>(),
        crc in any::<bool>(),
        reads in [1..20_u16, 1..20],
        mss in prop_oneof![Just(136_usize), 137..600_usize, Just(1448), Just(8948), Just(65_544)],
        rtr in prop_oneof![Just(None), Just(Some(Rtr::Read))],
        requests in 1..20_usize,
    ) {
        let mut random = Random(seed);
        let properties = Negotiated { role: Role::Initiator, crc, ird: reads[0], ord: reads[1], rtr };
        let tuning = Tuning::default().with_mss(mss).with_requests(requests).with_seed(u32::try_from(seed >> 32).unwrap());
        let mut pair = Pair::with(properties, tuning, 3 * AREA);
        for end in &mut pair.0 {
            random.fill(&mut end.host.memory[SOURCE..SOURCE + AREA]);
        }
        let [mut a, mut b] = [pair.0[0].host.memory.clone(), pair.0[1].host.memory.clone()];
        let mut at = [[TARGET, LANDING], [TARGET, LANDING]];
        let first = plan(&steps[0], &mut a, &mut b, &mut at, &mut random);
        at.reverse();
        let second = plan(&steps[1], &mut b, &mut a, &mut at, &mut random);
        // A responder without a ready-to-receive message must not send first.
        prop_assume!(rtr.is_some() || first_sends(&steps[0]));
        let plans = [first, second];
        run(&mut pair, &plans, &mut random);

        for (here, plan) in plans.iter().enumerate() {
            let (end, peer) = (&pair.0[here], &pair.0[1 - here]);
            prop_assert_eq!(end.stream.end(), None);
            check(plan, &plans[1 - here], &end.host, &peer.host)?;
            prop_assert!(end.inbox.is_empty() && end.stream.is_empty());
        }
        prop_assert!(pair.0[0].host.memory == a, "memory of the initiator");
        prop_assert!(pair.0[1].host.memory == b, "memory of the responder");
    }
}
