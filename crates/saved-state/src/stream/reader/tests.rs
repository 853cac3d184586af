use std::io;

use super::*;
use crate::pvrdma::{AdapterPart, Context};
use crate::{DeviceKind, SaveError, Writer};

const LIMIT: u64 = 1 << 20;

/// A record of a later release.
#[derive(Clone, PartialEq, prost::Message)]
struct Later {
    #[prost(string, tag = "1")]
    text: String,
}

impl Record for Later {
    const KIND: u16 = 0x7f01;
}

/// [`Context`] in another release: one field is new, one is gone.
#[derive(Clone, PartialEq, prost::Message)]
struct OtherContext {
    #[prost(uint32, tag = "2")]
    uar_page: u32,
    #[prost(message, optional, tag = "1000")]
    later: Option<Later>,
}

impl Record for OtherContext {
    const KIND: u16 = Context::KIND;
}

fn header() -> Header {
    Header { name: "vm1".to_owned(), time: 77, live: true, ..Header::new(DeviceKind::Vmxnet3, [2, 0, 0, 0, 0, 9]) }
}

fn context(handle: u32) -> Context {
    Context { handle, uar_page: 9 }
}

fn stream(write: impl FnOnce(&mut Writer<'_>) -> Result<(), SaveError>) -> Vec<u8> {
    let mut stream = Vec::new();
    let mut writer = Writer::new(&mut stream, &header(), LIMIT).unwrap();
    write(&mut writer).unwrap();
    writer.finish().unwrap();
    stream
}

/// Reads a whole stream of contexts.
fn read(mut stream: &[u8]) -> Result<(Header, Vec<Context>), LoadError> {
    let mut reader = Reader::new(&mut stream, LIMIT)?;
    let mut contexts = Vec::new();
    while let Some(record) = reader.next()? {
        contexts.push(record.decode()?);
    }
    Ok((reader.header().clone(), contexts))
}

#[test]
fn records_come_back_in_order_and_nothing_is_read_beyond_the_end() {
    let mut bytes = stream(|writer| {
        writer.write(&context(1))?;
        writer.write(&context(2))
    });
    assert_eq!(read(&bytes).unwrap(), (header(), vec![context(1), context(2)]));
    bytes.extend_from_slice(b"next");
    let mut rest = bytes.as_slice();
    let mut reader = Reader::new(&mut rest, LIMIT).unwrap();
    assert_eq!(reader.expect::<Context>().unwrap(), context(1));
    assert!(matches!(reader.expect::<Context>(), Ok(found) if found == context(2)));
    for _ in 0..2 {
        assert_eq!(reader.next().unwrap(), None);
    }
    let error = reader.expect::<Context>().unwrap_err();
    assert!(matches!(error, LoadError::Unexpected { found: 0, expected: Context::KIND }), "{error:?}");
    assert_eq!(rest, b"next");
}

#[test]
fn unknown_kinds_and_fields_are_skipped_and_missing_fields_have_their_default() {
    let later = Later { text: "later".to_owned() };
    let other = OtherContext { uar_page: 9, later: Some(later.clone()) };
    let bytes = stream(|writer| {
        writer.write(&later)?;
        writer.write(&other)?;
        writer.write(&later)?;
        writer.write(&context(5))
    });
    assert_eq!(read(&bytes).unwrap().1, [context(0), context(5)]);
    // The other release reads the stream of this one.
    let (bytes, own) = (stream(|writer| writer.write(&context(5))), OtherContext { later: None, ..other });
    assert_eq!(Reader::new(&mut bytes.as_slice(), LIMIT).unwrap().expect::<OtherContext>().unwrap(), own);
}

#[test]
fn a_needed_feature_that_the_reader_lacks_is_refused_by_name() {
    let mut stream = Vec::new();
    let header = Header { needs: vec!["known".to_owned(), "later".to_owned()], ..header() };
    Writer::new(&mut stream, &header, LIMIT).unwrap().finish().unwrap();
    let error = Reader::with_features(&mut stream.as_slice(), LIMIT, &["known"]).unwrap_err();
    assert!(matches!(&error, LoadError::Needs { name } if name == "later"), "{error:?}");
    assert!(error.to_string().contains("\"later\""));
    let mut input = stream.as_slice();
    let mut reader = Reader::with_features(&mut input, LIMIT, &["later", "known"]).unwrap();
    assert_eq!(reader.header(), &header);
    assert_eq!(reader.next().unwrap(), None);
}

#[test]
fn every_truncation_and_every_changed_byte_is_refused() {
    let bytes = stream(|writer| {
        writer.write(&Later { text: "later".to_owned() })?;
        writer.write(&context(1))
    });
    read(&bytes).unwrap();
    for length in 0..bytes.len() {
        let error = read(&bytes[..length]).unwrap_err();
        assert!(matches!(error, LoadError::Truncated), "{length} bytes: {error:?}");
    }
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            assert!(read(&changed).is_err(), "bit {bit} of byte {at}");
        }
    }
}

/// Returns a stream with this header, and with records of any kind and length.
fn forged(header: &[u8], records: &[(u16, u16, u32, &[u8])]) -> Vec<u8> {
    let length = u32::try_from(header.len()).unwrap();
    let mut bytes = [&MAGIC, length.to_le_bytes().as_slice(), header].concat();
    for (kind, zero, length, body) in records {
        bytes.extend(kind.to_le_bytes().into_iter().chain(zero.to_le_bytes()).chain(length.to_le_bytes()));
        bytes.extend_from_slice(body);
    }
    bytes
}

#[test]
fn malformed_streams_are_refused_with_the_reason() {
    let valid = header().to_message().encode_to_vec();
    let error = |header: &[u8], records: &[(u16, u16, u32, &[u8])]| read(&forged(header, records)).unwrap_err();

    assert!(matches!(read(b"PVRDMA\x02\0\0\0\0\0").unwrap_err(), LoadError::NotSavedState));
    // Format 2; no device kind; a kind of a later release; a MAC address of five bytes.
    assert!(matches!(error(b"\x08\x02", &[]), LoadError::Version { found: 2 }));
    for device in [&b"\x08\x01"[..], b"\x08\x01\x18\x09"] {
        assert!(matches!(error(device, &[]), LoadError::Header { field: "device kind" }));
    }
    assert!(matches!(error(b"\x08\x01\x18\x01\x2a\x05MAC..", &[]), LoadError::Header { field: "MAC address" }));
    assert!(matches!(error(b"\x07", &[]), LoadError::Malformed { kind: 0, .. }));
    // The second field of a record is reserved, and a length is refused before it is allocated.
    let kind = Context::KIND;
    assert!(matches!(error(&valid, &[(kind, 1, 0, b"")]), LoadError::RecordHeader { .. }));
    assert!(matches!(error(&valid, &[(kind, 0, u32::MAX, b"")]), LoadError::RecordTooLong { length: u32::MAX, .. }));
    assert!(matches!(error(&valid, &[(kind, 0, 2, b"\x08\xff")]), LoadError::Malformed { kind: Context::KIND, .. }));
    // An end record with another number of records, and one with another checksum.
    assert!(matches!(error(&valid, &[(END, 0, 2, b"\x08\x01")]), LoadError::Records { found: 0, expected: 1 }));
    assert!(matches!(error(&valid, &[(END, 0, 0, b"")]), LoadError::Checksum));
}

#[test]
fn both_sides_have_a_bound() {
    let long = AdapterPart { bytes: vec![0; MAX_RECORD] };
    let fits = AdapterPart { bytes: vec![0; MAX_RECORD - 4] };
    let mut out = Vec::new();
    let mut writer = Writer::new(&mut out, &header(), MAX_RECORD as u64 + 100).unwrap();
    assert!(matches!(writer.write(&long), Err(SaveError::RecordTooLong { kind: AdapterPart::KIND, .. })));
    writer.write(&fits).unwrap();
    let written = writer.written();
    assert!(matches!(
        writer.write(&context(1)).and_then(|()| writer.write(&long)),
        Err(SaveError::RecordTooLong { .. })
    ));
    assert!(matches!(writer.write(&fits), Err(SaveError::TooLong { .. })));
    assert!(written > MAX_RECORD as u64);

    let bytes = stream(|writer| writer.write(&fits));
    let limited = |limit| {
        let mut input = bytes.as_slice();
        let mut reader = Reader::new(&mut input, limit)?;
        while reader.next()?.is_some() {}
        Ok(reader.bytes())
    };
    let length = bytes.len() as u64;
    assert_eq!(limited(length).unwrap(), length);
    for limit in [0, 11, 12, length - 1] {
        assert!(matches!(limited(limit), Err::<u64, LoadError>(LoadError::TooLong { .. })), "{limit}");
    }
}

#[test]
fn a_dropped_writer_leaves_a_stream_that_is_refused() {
    let mut bytes = Vec::new();
    Writer::new(&mut bytes, &header(), LIMIT).unwrap().write(&context(1)).unwrap();
    assert!(matches!(read(&bytes), Err(LoadError::Truncated)));
}

#[test]
fn errors_of_input_and_output_are_passed_on() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionReset.into())
        }
    }
    impl io::Write for Broken {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    assert!(matches!(Reader::new(&mut Broken, LIMIT), Err(LoadError::Io(_))));
    assert!(matches!(Writer::new(&mut Broken, &header(), LIMIT), Err(SaveError::Io(_))));
}
