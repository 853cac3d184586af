//! The next release of the format, as this one sees it: with a field more, a field less, another kind of record, and a
//! feature that a reader must know. Both directions are read.

use super::reader::Reader;
use crate::{DeviceKind, Header, LoadError, Record, Writer, pvrdma};

/// The next release adds a field to the protection domain, and has removed its owner.
#[derive(Clone, PartialEq, prost::Message)]
struct NextPd {
    #[prost(uint32, tag = "1")]
    handle: u32,
    #[prost(uint32, tag = "900")]
    added: u32,
}

impl Record for NextPd {
    const KIND: u16 = pvrdma::Pd::KIND;
}

/// A kind of record that this release does not know.
#[derive(Clone, PartialEq, prost::Message)]
struct NextKind {
    #[prost(uint32, tag = "1")]
    value: u32,
}

impl Record for NextKind {
    const KIND: u16 = 0x01ff;
}

fn state(needs: &[&str], write: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let needs = needs.iter().map(|&name| name.to_owned()).collect();
    let mut stream = Vec::new();
    let header = Header { needs, ..Header::new(DeviceKind::Pvrdma, [2, 0, 0, 0, 0, 1]) };
    let mut writer = Writer::new(&mut stream, &header, 1 << 20).unwrap();
    write(&mut writer);
    writer.finish().unwrap();
    stream
}

/// This release reads a state of the next one: unknown fields are skipped, and missing fields have their defaults.
#[test]
fn a_state_of_the_next_release_is_read() {
    let stream = state(&[], |writer| {
        writer.write(&NextKind { value: 1 }).unwrap();
        writer.write(&NextPd { handle: 7, added: 9 }).unwrap();
    });
    let mut input = stream.as_slice();
    let mut reader = Reader::new(&mut input, 1 << 20).unwrap();
    assert_eq!(reader.expect::<pvrdma::Pd>().unwrap(), pvrdma::Pd { handle: 7, owner: 0 });
    assert!(reader.next().unwrap().is_none());
}

/// The next release reads a state of this one: the field that it adds has its default.
#[test]
fn the_next_release_reads_a_state() {
    let stream = state(&[], |writer| writer.write(&pvrdma::Pd { handle: 7, owner: 3 }).unwrap());
    let mut input = stream.as_slice();
    let mut reader = Reader::with_features(&mut input, 1 << 20, &["next"]).unwrap();
    assert_eq!(reader.expect::<NextPd>().unwrap(), NextPd { handle: 7, added: 0 });
}

/// A feature that is in use is refused by its name where it is not known, and read where it is.
#[test]
fn a_feature_in_use_must_be_known() {
    let stream = state(&["next"], |writer| writer.write(&NextPd { handle: 7, added: 9 }).unwrap());
    let mut input = stream.as_slice();
    let refused = Reader::new(&mut input, 1 << 20).unwrap_err();
    assert!(matches!(&refused, LoadError::Needs { name } if name == "next"), "{refused}");
    assert!(refused.to_string().contains("next"), "{refused}");
    let mut input = stream.as_slice();
    let mut reader = Reader::with_features(&mut input, 1 << 20, &["next"]).unwrap();
    assert_eq!(reader.expect::<NextPd>().unwrap().added, 9);
}

/// A field of another type under the same number is refused, as it would be if a number were used again.
#[test]
fn a_number_that_is_used_again_is_noticed() {
    #[derive(Clone, PartialEq, prost::Message)]
    struct Reused {
        #[prost(string, tag = "2")]
        owner: String,
    }
    impl Record for Reused {
        const KIND: u16 = pvrdma::Pd::KIND;
    }
    let stream = state(&[], |writer| writer.write(&Reused { owner: "x".to_owned() }).unwrap());
    let mut input = stream.as_slice();
    let mut reader = Reader::new(&mut input, 1 << 20).unwrap();
    assert!(reader.expect::<pvrdma::Pd>().is_err());
}
