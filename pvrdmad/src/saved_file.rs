//! Prints files with saved states of devices.
//!
//! Keys and packet sequence numbers are secrets, with which a host can forge the traffic of the VM. They are printed
//! only on request.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;

use anyhow::{Context, Result};
use jiff::Timestamp;
use pvrdma_saved_state::{DeviceKind, Header, Message, RawRecord, Reader, Record, kind_name, pvrdma, rxe, vmxnet3};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// Name of a file that stands for standard input.
const STANDARD_INPUT: &str = "-";

/// Longest state that is read, in bytes. One record at a time is in memory.
const LIMIT: u64 = 1 << 30;

/// Longest part of an adapter for one object, in bytes.
const MAX_PART: usize = 64 << 20;

/// Fields that are not printed: keys, packet sequence numbers, and fields from which they can be calculated.
const SECRETS: &[&str] = &[
    "ack_msn",
    "ack_psn",
    "bytes",
    "executed",
    "expected",
    "invalidate",
    "key",
    "keys",
    "lkey",
    "msn",
    "new_since",
    "old_since",
    "psn",
    "qkey",
    "request",
    "rkey",
    "rq_psn",
    "sent",
    "splits",
    "sq_psn",
    "una",
    "unacked_duplicate",
];

/// Prints the states in a file, which follow each other: for people a line for each record, or JSON.
///
/// # Errors
/// The file cannot be read, or holds something else. The part before the error is printed.
pub fn show(file: &Path, as_json: bool, secrets: bool, out: &mut dyn Write) -> Result<()> {
    let name = || file.display().to_string();
    let mut input: Box<dyn Read> = match file == Path::new(STANDARD_INPUT) {
        true => Box::new(io::stdin()),
        false => Box::new(File::open(file).with_context(name)?),
    };
    let mut out = BufWriter::new(out);
    let shown = print(&mut BufReader::new(&mut input), as_json, secrets, &mut out);
    out.flush().context("standard output")?;
    shown.with_context(name)
}

fn print(input: &mut dyn Read, as_json: bool, secrets: bool, out: &mut dyn Write) -> Result<()> {
    let mut first = true;
    loop {
        let mut start = [0; 1];
        if input.read(&mut start)? == 0 && !first {
            return Ok(());
        }
        let mut input = start.chain(&mut *input);
        let mut reader = Reader::new(&mut input, LIMIT)?;
        let header = describe(reader.header());
        match as_json {
            true => write!(out, "{}{{\"header\":{header},\"records\":[", if first { "" } else { "\n" })?,
            false => writeln!(out, "{}{}", if first { "" } else { "\n" }, heading(reader.header()))?,
        }
        let (mut part, mut separator) = (Vec::new(), "");
        while let Some(record) = reader.next()? {
            let Some(mut fields) = fields(record, &mut part)? else { continue };
            if !secrets {
                hide(&mut fields);
            }
            let kind = kind_name(record.kind).unwrap_or_default();
            match as_json {
                true => write!(out, "{separator}\n{}", json!({ "kind": kind, "fields": fields }))?,
                false => writeln!(out, "{}", line(&kind, &fields))?,
            }
            separator = ",";
        }
        if as_json {
            writeln!(out, "\n]}}")?;
        }
        first = false;
    }
}

const fn device(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Pvrdma => "pvrdma",
        DeviceKind::Vmxnet3 => "vmxnet3",
    }
}

fn mac(header: &Header) -> String {
    header.mac.map(|byte| format!("{byte:02x}")).join(":")
}

fn time(header: &Header) -> Option<String> {
    let time = Timestamp::from_millisecond(i64::try_from(header.time).ok()?).ok()?;
    Some(time.to_string())
}

fn describe(header: &Header) -> Value {
    json!({
        "product": header.product,
        "device": device(header.device),
        "name": header.name,
        "mac": mac(header),
        "time": time(header),
        "live": header.live,
        "needs": header.needs,
    })
}

fn heading(header: &Header) -> String {
    let time = time(header).unwrap_or_else(|| "at an unknown time".to_owned());
    let live = if header.live { "for a live migration" } else { "for a snapshot or a hand-over" };
    let needs = if header.needs.is_empty() { String::new() } else { format!(", needs {}", header.needs.join(" ")) };
    let (name, kind) = (header.name.escape_default(), device(header.device));
    format!(
        "device {name} ({kind}, mac {}): saved {time} {live} by version {}{}",
        mac(header),
        header.product.escape_default(),
        needs.escape_default()
    )
}

/// Returns the fields of a record; that of an adapter's part has none, and is printed with its object.
fn fields(record: RawRecord<'_>, part: &mut Vec<u8>) -> Result<Option<Value>> {
    fn read<R: Record + Serialize>(record: RawRecord<'_>) -> Result<Option<Value>> {
        Ok(Some(serde_json::to_value(record.decode::<R>()?)?))
    }
    let own = match record.kind {
        pvrdma::AdapterPart::KIND => {
            let pvrdma::AdapterPart { bytes } = record.decode()?;
            anyhow::ensure!(part.len().saturating_add(bytes.len()) <= MAX_PART, "a part of the adapter is too long");
            part.extend(bytes);
            return Ok(None);
        }
        pvrdma::Device::KIND => read::<pvrdma::Device>(record),
        pvrdma::Table::KIND => read::<pvrdma::Table>(record),
        pvrdma::Pages::KIND => read::<pvrdma::Pages>(record),
        pvrdma::AdapterTables::KIND => read::<pvrdma::AdapterTables>(record),
        pvrdma::EventRing::KIND => read::<pvrdma::EventRing>(record),
        pvrdma::WaitingEvents::KIND => read::<pvrdma::WaitingEvents>(record),
        pvrdma::Context::KIND => read::<pvrdma::Context>(record),
        pvrdma::Pd::KIND => read::<pvrdma::Pd>(record),
        pvrdma::Cq::KIND => read::<pvrdma::Cq>(record),
        pvrdma::Srq::KIND => read::<pvrdma::Srq>(record),
        pvrdma::Mr::KIND => read::<pvrdma::Mr>(record),
        pvrdma::Qp::KIND => read::<pvrdma::Qp>(record),
        pvrdma::Gid::KIND => read::<pvrdma::Gid>(record),
        vmxnet3::Function::KIND => read::<vmxnet3::Function>(record),
        vmxnet3::MulticastAddresses::KIND => read::<vmxnet3::MulticastAddresses>(record),
        _ => Ok(None),
    };
    let Some(mut own) = own? else { return Ok(None) };
    if let (Value::Object(own), Some(adapters)) = (&mut own, adapters_part(record.kind, part)?) {
        own.insert("adapter".to_owned(), adapters);
    }
    Ok(Some(own))
}

/// Returns the software adapter's part of the object, of which `part` has the bytes.
fn adapters_part(kind: u16, part: &mut Vec<u8>) -> Result<Option<Value>> {
    fn read<M: Message + Default + Serialize>(part: &[u8]) -> Result<Option<Value>> {
        Ok(Some(serde_json::to_value(M::decode(part)?)?))
    }
    if kind == pvrdma::Pages::KIND {
        return Ok(None);
    }
    let part = std::mem::take(part);
    match kind {
        pvrdma::AdapterTables::KIND => read::<rxe::AdapterTables>(&part),
        pvrdma::Mr::KIND => read::<rxe::Region>(&part),
        pvrdma::Srq::KIND => read::<rxe::SharedReceiveQueue>(&part),
        pvrdma::Qp::KIND => read::<rxe::QueuePair>(&part),
        _ => Ok(None),
    }
}

/// Replaces secrets.
fn hide(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            // The indices in keys begin at the `base` of a table, so `base` tells a part of each key.
            let is_table = fields.contains_key("free");
            for (name, value) in fields {
                let is_secret = SECRETS.binary_search(&name.as_str()).is_ok() || is_table && name == "base";
                if is_secret && !value.is_null() {
                    *value = Value::from("hidden");
                } else {
                    hide(value);
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(hide),
        _ => {}
    }
}

/// Returns a line for people, without the fields that have their default values.
fn line(kind: &str, fields: &Value) -> String {
    let empty = Map::new();
    let fields = fields.as_object().unwrap_or(&empty).iter().filter(|(_, value)| !is_default(value));
    let fields: Vec<_> = fields.map(|(name, value)| format!("{name}={value}")).collect();
    let name = kind.rsplit("::").next().unwrap_or(kind);
    [&[name.to_owned()][..], &fields].concat().join(" ")
}

fn is_default(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Bool(true) | Value::Object(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use pvrdma_saved_state::Writer;

    use super::*;

    /// Returns the state of a device with a queue pair whose secrets are recognizable.
    fn state(name: &str) -> Vec<u8> {
        let mut stream = Vec::new();
        let header =
            Header { name: name.to_owned(), time: 1000, ..Header::new(DeviceKind::Pvrdma, [2, 0, 0, 0, 0, 1]) };
        let mut writer = Writer::new(&mut stream, &header, LIMIT).unwrap();
        let region = rxe::Region { key: 777_001, filled: None };
        writer.write(&pvrdma::AdapterPart { bytes: region.encode_to_vec() }).unwrap();
        writer.write(&pvrdma::Pages { addresses: vec![4096], counts: vec![1] }).unwrap();
        writer.write(&pvrdma::Mr { handle: 5, ..pvrdma::Mr::default() }).unwrap();
        let attrs = rxe::QpAttributes { sq_psn: 777_002, qkey: 777_003, dest_qpn: 9, ..rxe::QpAttributes::default() };
        let qp = rxe::QueuePair { attrs: Some(attrs), ..rxe::QueuePair::default() };
        writer.write(&pvrdma::AdapterPart { bytes: qp.encode_to_vec() }).unwrap();
        writer.write(&pvrdma::Qp { handle: 6, qpn: 12, ..pvrdma::Qp::default() }).unwrap();
        writer.finish().unwrap();
        stream
    }

    fn printed(input: &[u8], as_json: bool, secrets: bool) -> Result<String> {
        let (mut out, mut input) = (Vec::new(), input);
        print(&mut input, as_json, secrets, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_state_for_people_and_as_json() {
        let two = [state("vm1"), state("vm2")].concat();
        let text = printed(&two, false, false).unwrap();
        assert!(text.contains("device vm1 (pvrdma, mac 02:00:00:00:00:01): saved 1970-01-01T00:00:01Z"), "{text}");
        assert!(text.contains("\nMr adapter={\"filled\":null,\"key\":\"hidden\"} handle=5\n"), "{text}");
        assert!(text.contains("device vm2") && text.contains("\"dest_qpn\":9") && !text.contains("777"), "{text}");
        let json = printed(&state("vm1"), true, false).unwrap();
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&value["header"]["name"], value["records"].as_array().unwrap().len()), (&"vm1".into(), 3));
        assert_eq!(value["records"][2]["fields"]["adapter"]["attrs"]["sq_psn"], "hidden");
        assert!(!json.contains("777"));
        let all = printed(&two, true, true).unwrap();
        assert!(["777001", "777002", "777003"].iter().all(|secret| all.contains(secret)), "{all}");
    }

    #[test]
    fn anything_else_is_refused() {
        let good = state("vm1");
        assert!(printed(b"", false, false).is_err());
        assert!(
            printed(b"{\"name\": \"not a state\"}", false, false).unwrap_err().to_string().contains("no saved state")
        );
        assert!(printed(&good[..good.len() - 1], true, false).is_err());
        assert!(printed(&[&good[..], b"x"].concat(), true, false).is_err());
        let mut damaged = good;
        let last = damaged.len() - 1;
        damaged[last] ^= 1;
        assert!(printed(&damaged, false, false).is_err());
    }

    /// A field that is added later must not be printed for its name alone.
    #[test]
    fn each_key_and_sequence_number_is_hidden() {
        assert!(SECRETS.is_sorted());
        let sources = [
            include_str!("../../crates/saved-state/src/pvrdma.rs"),
            include_str!("../../crates/saved-state/src/roce.rs"),
            include_str!("../../crates/saved-state/src/rxe.rs"),
            include_str!("../../crates/saved-state/src/work.rs"),
        ];
        let fields = sources.iter().flat_map(|source| source.lines()).filter_map(|line| {
            let (name, _) = line.strip_prefix("    pub ")?.split_once(':')?;
            Some(name)
        });
        for name in fields.filter(|name| *name != "pkey_index") {
            let is_secret = ["key", "psn", "msn"].iter().any(|word| name.contains(word));
            assert!(!is_secret || SECRETS.contains(&name), "{name}");
        }
    }
}
