//! Each saved field has an effect: a state with another value is refused, or restored with that value.

use pvrdma_saved_state::{DeviceKind, Header, Reader, Record, Writer, kind_name, pvrdma as saved};

use super::hostile::Edit;
use super::world::{Populated, World, records};

/// Messages that are fields of records: kind of the record, and number of the field.
const NESTED: [(u16, u64); 5] = [
    (saved::Device::KIND, 12),
    (saved::Device::KIND, 13),
    (saved::Srq::KIND, 6),
    (saved::Qp::KIND, 14),
    (saved::Qp::KIND, 15),
];

fn varint(bytes: &[u8], at: &mut usize) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

fn put_varint(mut value: u64, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push(u8::try_from(value & 0x7f).unwrap() | 0x80);
        value >>= 7;
    }
    to.push(u8::try_from(value).unwrap());
}

/// Returns the message with each of its fields changed, with the number of the field.
fn mutations(kind: u16, message: &[u8], depth: u32) -> Vec<(String, Vec<u8>)> {
    let (mut at, mut all) = (0, Vec::new());
    while at < message.len() {
        let start = at;
        let key = varint(message, &mut at);
        let (number, before) = (key >> 3, &message[..start]);
        let mut field = Vec::new();
        put_varint(key, &mut field);
        let mut push = |name: String, changed: &[u8], end: usize| {
            all.push((name, [before, &field, changed, &message[end..]].concat()));
        };
        match key & 7 {
            0 => {
                let value = varint(message, &mut at);
                for other in [value ^ 1, value + 2] {
                    let mut changed = Vec::new();
                    put_varint(other, &mut changed);
                    push(format!("{number}"), &changed, at);
                }
            }
            2 => {
                let length = usize::try_from(varint(message, &mut at)).unwrap();
                let body = &message[at..at + length];
                at += length;
                let changed = if depth == 0 && NESTED.contains(&(kind, number)) {
                    mutations(kind, body, 1)
                } else {
                    let mut flipped = body.to_vec();
                    flipped[length / 2] ^= 1;
                    vec![(String::new(), flipped)]
                };
                for (name, body) in changed {
                    let mut changed = Vec::new();
                    put_varint(body.len() as u64, &mut changed);
                    changed.extend(body);
                    push(format!("{number}.{name}"), &changed, at);
                }
            }
            other => panic!("wire type {other}"),
        }
    }
    all
}

/// Returns the stream with the body of one record replaced.
fn replaced(stream: &[u8], index: usize, body: &[u8]) -> Vec<u8> {
    let (mut input, mut output) = (stream, Vec::new());
    let mut reader = Reader::new(&mut input, u64::MAX).unwrap();
    let header = Header::new(DeviceKind::Pvrdma, [0x52, 0x54, 0, 0, 0, 1]);
    let mut writer = Writer::new(&mut output, &header, u64::MAX).unwrap();
    let mut at = 0;
    while let Some(record) = reader.next().unwrap() {
        let edit = Edit { kind: record.kind, body: record.body, writer: &mut writer };
        edit.copy(if at == index { body } else { record.body });
        at += 1;
    }
    writer.finish().unwrap();
    output
}

/// Fields that are checked or translated at the restore, and are not restored as they are.
fn is_not_restored(kind: u16, field: &str) -> bool {
    match kind {
        // Read-only bytes of configuration space, and the version of the device, which may be higher.
        saved::Device::KIND => field.starts_with("1.") || field == "2",
        _ => false,
    }
}

#[test]
fn each_field_is_restored_or_refused() {
    let saved = Populated::new().save();
    let all = records(&saved);
    let (mut accepted, mut refused, mut lost) = (0, 0, Vec::new());
    for (index, (kind, body)) in all.iter().enumerate() {
        for (field, body) in mutations(*kind, body, 0) {
            let stream = replaced(&saved, index, &body);
            let mut world = World::new();
            if world.move_on(&stream).is_err() {
                refused += 1;
                continue;
            }
            accepted += 1;
            // Objects are saved in the order of their handles.
            let [mut expected, mut again] = [records(&stream), records(&world.save())];
            expected.sort_unstable();
            again.sort_unstable();
            let name = kind_name(*kind).unwrap();
            if !is_not_restored(*kind, &field) && expected != again {
                lost.push(format!("{name} field {field}"));
            }
        }
    }
    assert!(lost.is_empty(), "{lost:?}");
    assert!(accepted > 50 && refused > 50, "{accepted} {refused}");
}
