//! Memory that the decoded form of an adapter's part takes.
//!
//! A part is as long as its owner accepts, unlike a record, and a list takes many times more memory than its encoding:
//! an empty element is two bytes. So a reader compares the memory with its budget before it decodes a part.

use prost::Message;

use crate::{roce, rxe, work};

/// A message that is an adapter's part.
pub trait Part: Message + Default {
    /// Its fields with lists.
    #[doc(hidden)]
    const SHAPE: &'static Shape;
}

/// Returns the bytes of heap that the decoded form of a part may take. `None`: it is malformed.
pub fn decoded_bytes<P: Part>(body: &[u8]) -> Option<u64> {
    P::SHAPE.weigh(body)
}

/// The fields of a message that are lists, or contain some.
#[derive(Debug)]
pub struct Shape {
    #[cfg_attr(not(test), expect(dead_code, reason = "for the test that all lists are named"))]
    name: &'static str,
    fields: &'static [(u64, Field)],
}

/// Content of a field.
#[derive(Debug)]
enum Field {
    /// One message.
    One(&'static Shape),
    /// A list of messages, each of which takes this number of bytes.
    List(&'static Shape, usize),
    /// A list of numbers, each of which takes this number of bytes.
    Numbers(usize),
}

use Field::{List, Numbers, One};

const fn leaf(name: &'static str) -> Shape {
    Shape { name, fields: &[] }
}

static SGE: Shape = leaf("work::Sge");
static PAGES: Shape =
    Shape { name: "pages::PageList", fields: &[(1, Numbers(size_of::<u64>())), (2, Numbers(size_of::<u32>()))] };
static FAST_REGISTER: Shape = Shape { name: "work::FastRegister", fields: &[(5, One(&PAGES))] };
static SEND: Shape =
    Shape { name: "work::SendWr", fields: &[(3, List(&SGE, size_of::<work::Sge>())), (10, One(&FAST_REGISTER))] };
static RECV: Shape = Shape { name: "work::RecvWr", fields: &[(2, List(&SGE, size_of::<work::Sge>()))] };
static READS: Shape = Shape { name: "roce::ReadGrid", fields: &[(5, Numbers(size_of::<u32>()))] };
static REQUEST: Shape = Shape { name: "roce::Request", fields: &[(1, One(&SEND))] };
static REQUESTER: Shape =
    Shape { name: "roce::Requester", fields: &[(5, List(&REQUEST, size_of::<roce::Request>())), (6, One(&READS))] };
static RESPONSE: Shape = leaf("roce::Response");
static RESOURCE: Shape = leaf("roce::Resource");
static RESPONDER: Shape = Shape {
    name: "roce::Responder",
    fields: &[(11, List(&RESPONSE, size_of::<roce::Response>())), (12, List(&RESOURCE, size_of::<roce::Resource>()))],
};
static WIRE_REQUESTER: Shape = Shape { name: "rxe::WireRequester", fields: &[(2, One(&REQUESTER))] };
static WIRE_RESPONDER: Shape = Shape { name: "rxe::WireResponder", fields: &[(3, One(&RESPONDER))] };
static QP_REQUESTER: Shape = Shape { name: "rxe::Requester", fields: &[(2, One(&SEND)), (10, One(&WIRE_REQUESTER))] };
static QP_RESPONDER: Shape = Shape { name: "rxe::Responder", fields: &[(2, One(&RECV)), (6, One(&WIRE_RESPONDER))] };
static QUEUE_PAIR: Shape =
    Shape { name: "rxe::QueuePair", fields: &[(5, One(&QP_REQUESTER)), (6, One(&QP_RESPONDER))] };
static ADAPTER_TABLES: Shape = Shape {
    name: "rxe::AdapterTables",
    fields: &[(3, Numbers(size_of::<u32>())), (4, Numbers(size_of::<u32>())), (5, Numbers(size_of::<u32>()))],
};
static FILLED: Shape = Shape { name: "rxe::Filled", fields: &[(4, One(&PAGES))] };
static REGION: Shape = Shape { name: "rxe::Region", fields: &[(2, One(&FILLED))] };
static SHARED_RECEIVE_QUEUE: Shape = leaf("rxe::SharedReceiveQueue");

impl Part for rxe::QueuePair {
    const SHAPE: &'static Shape = &QUEUE_PAIR;
}

impl Part for rxe::AdapterTables {
    const SHAPE: &'static Shape = &ADAPTER_TABLES;
}

impl Part for rxe::Region {
    const SHAPE: &'static Shape = &REGION;
}

impl Part for rxe::SharedReceiveQueue {
    const SHAPE: &'static Shape = &SHARED_RECEIVE_QUEUE;
}

impl Shape {
    fn weigh(&self, mut body: &[u8]) -> Option<u64> {
        let mut sum = 0_u64;
        while !body.is_empty() {
            let (number, value) = field(&mut body)?;
            let field = self.fields.iter().find(|(known, _)| *known == number).map(|(_, field)| field);
            let bytes = match (field, value) {
                (Some(One(shape)), Some(value)) => shape.weigh(value)?,
                (Some(List(shape, size)), Some(value)) => shape.weigh(value)?.checked_add(grown(1, *size)?)?,
                // Each number takes at least a byte.
                (Some(Numbers(size)), Some(value)) => grown(value.len(), *size)?,
                (Some(Numbers(size)), None) => grown(1, *size)?,
                // Bytes, or a message without lists, whose bytes these contain.
                (None, Some(value)) => u64::try_from(value.len()).ok()?,
                (Some(One(_) | List(..)) | None, None) => 0,
            };
            sum = sum.checked_add(bytes)?;
        }
        Some(sum)
    }
}

/// Returns the bytes of a list whose capacity has doubled when it became full.
fn grown(elements: usize, size: usize) -> Option<u64> {
    u64::try_from(elements.checked_mul(size)?.checked_mul(2)?).ok()
}

/// Removes a field from the beginning of a message. Returns its number, and its content if that has a length.
fn field<'a>(body: &mut &'a [u8]) -> Option<(u64, Option<&'a [u8]>)> {
    let key = varint(body)?;
    let value = match key & 7 {
        0 => {
            varint(body)?;
            None
        }
        1 => split(body, 8).map(|_| None)?,
        2 => {
            let length = usize::try_from(varint(body)?).ok()?;
            Some(split(body, length)?)
        }
        5 => split(body, 4).map(|_| None)?,
        // Groups, which no writer uses.
        _ => return None,
    };
    Some((key >> 3, value))
}

fn split<'a>(body: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (value, rest) = body.split_at_checked(length)?;
    *body = rest;
    Some(value)
}

fn varint(body: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (byte, rest) = body.split_first()?;
        *body = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if *byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::pages::PageList;

    /// Sources of the messages that parts consist of.
    const SOURCES: [(&str, &str); 4] = [
        ("pages", include_str!("../pages.rs")),
        ("roce", include_str!("../roce.rs")),
        ("rxe", include_str!("../rxe.rs")),
        ("work", include_str!("../work.rs")),
    ];

    fn listed(shape: &'static Shape, to: &mut BTreeSet<(String, u64)>) {
        for (number, field) in shape.fields {
            if let List(..) | Numbers(_) = field {
                to.insert((shape.name.to_owned(), *number));
            }
            if let One(shape) | List(shape, _) = field {
                listed(shape, to);
            }
        }
    }

    /// A new list is added to its shape.
    #[test]
    fn all_lists_of_the_messages_are_weighed() {
        let (mut weighed, mut declared, mut message) = (BTreeSet::new(), BTreeSet::new(), String::new());
        for (module, source) in SOURCES {
            for line in source.lines().map(str::trim) {
                if let Some(name) = line.strip_prefix("pub struct ").and_then(|rest| rest.split(' ').next()) {
                    message = format!("{module}::{name}");
                }
                if let Some((_, rest)) = line.split_once("repeated, tag = \"") {
                    let number = rest.split('"').next().unwrap().parse().unwrap();
                    declared.insert((message.clone(), number));
                }
            }
        }
        for shape in
            [rxe::QueuePair::SHAPE, rxe::AdapterTables::SHAPE, rxe::Region::SHAPE, rxe::SharedReceiveQueue::SHAPE]
        {
            listed(shape, &mut weighed);
        }
        assert_eq!(weighed, declared);
    }

    fn queue_pair(transport: roce::Requester) -> rxe::QueuePair {
        let wire = rxe::WireRequester { source: None, transport: Some(transport) };
        let route = Some(rxe::Route::Wire(Box::new(wire)));
        rxe::QueuePair { requester: Some(rxe::Requester { route, ..Default::default() }), ..Default::default() }
    }

    #[test]
    fn lists_weigh_what_their_elements_take() {
        let weigh = |transport| decoded_bytes::<rxe::QueuePair>(&queue_pair(transport).encode_to_vec()).unwrap();
        assert_eq!(weigh(roce::Requester::default()), 0);
        let requests = |request: roce::Request| roce::Requester { requests: vec![request; 1000], ..Default::default() };
        let empty = weigh(requests(roce::Request::default()));
        assert_eq!(empty, 2000 * size_of::<roce::Request>() as u64);
        let sges = vec![work::Sge::default(); 16];
        let work = Some(work::SendWr { sges, ..Default::default() });
        let filled = weigh(requests(roce::Request { work, ..Default::default() }));
        assert_eq!(filled - empty, 2000 * 16 * size_of::<work::Sge>() as u64);
        let pages = Some(PageList { first: vec![0; 100], count: vec![0; 100] });
        let operation = work::Operation::FastRegister(work::FastRegister { pages, ..Default::default() });
        let work = Some(work::SendWr { operation: Some(operation), ..Default::default() });
        let registers = weigh(requests(roce::Request { work, ..Default::default() }));
        assert_eq!(registers - empty, 2000 * 100 * 12);
        let table = rxe::AdapterTables { keys: vec![0; 77], free: vec![0; 50], ..Default::default() };
        assert_eq!(decoded_bytes::<rxe::AdapterTables>(&table.encode_to_vec()), Some(77 + 400));
    }

    #[test]
    fn malformed_messages_have_no_weight() {
        // A key without a value, a length beyond the end, a group, a number without an end.
        for body in [&[0x08][..], &[0x2a, 9, 0], &[0x0b], &[0xff; 11], &[0x09, 1, 2], &[0x2a, 2, 0x0a, 1]] {
            assert_eq!(decoded_bytes::<rxe::QueuePair>(body), None, "{body:x?}");
        }
    }
}
