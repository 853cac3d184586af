//! Changes of saved states, with a correct frame and checksum.

use crate::{Header, LoadError, Reader, SaveError, Writer};

/// Longest state.
const LIMIT: u64 = 64 << 20;

/// Records of a state: kind and body.
pub type Records = Vec<(u16, Vec<u8>)>;

/// Splits a state into its header and its records of known kinds.
///
/// # Errors
/// It is no state.
pub fn split(state: &[u8]) -> Result<(Header, Records), LoadError> {
    let mut input = state;
    let mut reader = Reader::new(&mut input, LIMIT)?;
    let (header, mut records) = (reader.header().clone(), Vec::new());
    while let Some(record) = reader.next()? {
        records.push((record.kind, record.body.to_vec()));
    }
    Ok((header, records))
}

/// Writes a state of any records.
///
/// # Errors
/// A record or the state is too long.
pub fn join(header: &Header, records: &Records) -> Result<Vec<u8>, SaveError> {
    let mut state = Vec::new();
    let mut writer = Writer::new(&mut state, header, LIMIT)?;
    records.iter().try_for_each(|(kind, body)| writer.write_raw(*kind, body))?;
    writer.finish()?;
    Ok(state)
}

/// A change of a list of records, at places that are taken modulo the number of places.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// Sets a byte.
    Set(u16, u16, u8),
    /// Inserts a byte.
    Insert(u16, u16, u8),
    /// Removes bytes.
    Remove(u16, u16, u8),
    /// Removes a record.
    Drop(u16),
    /// Puts a copy of a record in front of another one.
    Copy(u16, u16),
    /// Gives a record another kind.
    Kind(u16, u8),
}

/// The numbers of a fuzzer, each combination of which is a change.
impl From<(u8, u16, u16, u8)> for Change {
    fn from((change, record, at, value): (u8, u16, u16, u8)) -> Self {
        match change % 6 {
            0 => Self::Set(record, at, value),
            1 => Self::Insert(record, at, value),
            2 => Self::Remove(record, at, value),
            3 => Self::Drop(record),
            4 => Self::Copy(record, at),
            _ => Self::Kind(record, value),
        }
    }
}

/// Makes changes.
pub fn change(records: &mut Records, changes: impl IntoIterator<Item = Change>) {
    for change in changes {
        let Some(last) = records.len().checked_sub(1) else { return };
        let place = |at: u16| usize::from(at) % (last + 1);
        match change {
            Change::Set(record, at, value) => {
                let (_, body) = &mut records[place(record)];
                let at = usize::from(at) % body.len().max(1);
                body.iter_mut().skip(at).take(1).for_each(|byte| *byte = value);
            }
            Change::Insert(record, at, value) => {
                let (_, body) = &mut records[place(record)];
                body.insert(usize::from(at) % (body.len() + 1), value);
            }
            Change::Remove(record, at, count) => {
                let (_, body) = &mut records[place(record)];
                let at = usize::from(at) % (body.len() + 1);
                let end = body.len().min(at + usize::from(count));
                body.drain(at..end);
            }
            Change::Drop(record) => _ = records.remove(place(record)),
            Change::Copy(record, to) => records.insert(place(to), records[place(record)].clone()),
            Change::Kind(record, low) => {
                let (kind, _) = &mut records[place(record)];
                *kind = *kind & 0xff00 | u16::from(low);
            }
        }
    }
}
