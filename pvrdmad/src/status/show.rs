//! Renders the objects of a device as tables.

use pvrdma_dev::ObjectKind;
use serde_json::Value;

use super::table::{size, table};

/// A column: its header, and the function that renders the cell of an object.
type Column = (&'static str, fn(&Value) -> String);

/// Renders the result of [`pvrdma_dev::PvrdmaDevice::inspect_objects`] as text. Further details are only in the JSON.
pub fn render_objects(kind: ObjectKind, objects: &Value) -> String {
    let Some(list) = objects.as_array() else { return render_fields(objects) };
    let columns = columns(kind);
    let row = |object: &Value| columns.iter().map(|(_, cell)| cell(object)).collect();
    let text = table(columns.iter().map(|&(head, _)| head), columns.len(), list.iter().map(row));
    match (text.is_empty(), kind) {
        (true, ObjectKind::Migratable) => "nothing keeps the device from moving\n".to_owned(),
        (true, kind) => format!("no {kind}\n"),
        (false, _) => text,
    }
}

/// Renders the plain members of an object and of its nested objects.
fn render_fields(object: &Value) -> String {
    let mut rows = Vec::new();
    collect("", object, &mut rows);
    table(["field", "value"], 2, rows)
}

fn collect(path: &str, value: &Value, rows: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                collect(&if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, member, rows);
            }
        }
        // Counters that are zero are left out.
        Value::Number(number) if number.as_u64() == Some(0) && path.contains('.') => {}
        value => rows.push(vec![path.to_owned(), word(value)]),
    }
}

/// Renders a plain value without quotes.
fn word(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Renders a ring: used entries, size, and indices. Only the size is known if the memory of the ring is gone.
fn ring(ring: &Value) -> String {
    match ring["size"].as_u64() {
        None => "-".to_owned(),
        Some(size) => format!("{}/{size} {}:{}", word(&ring["used"]), word(&ring["head"]), word(&ring["tail"])),
    }
}

/// Renders the state of a QP, taken from the adapter while the attributes are locked.
fn qp_state(qp: &Value) -> String {
    let known = [&qp["attrs"], &qp["adapter"]].into_iter().find(|part| part["state"].is_string());
    word(known.map_or(&qp["attrs"], |part| &part["state"]))
}

/// Renders the route of a QP's requests, on the wire with the first PSN that is not acknowledged and the next PSN.
fn path(qp: &Value) -> String {
    let requester = &qp["adapter"]["requester"];
    let route = &requester["route"];
    let psn = |name: &str| route[name].as_u64().map_or_else(|| "-".to_owned(), |psn| format!("{psn:#x}"));
    match route["path"].as_str() {
        Some("wire") => format!("wire {}:{}", psn("snd_una"), psn("snd_nxt")),
        Some(path) => path.to_owned(),
        None if qp["adapter"]["host_qpn"].is_u64() => "host".to_owned(),
        None => word(requester),
    }
}

/// Renders the peer of a connected QP.
fn peer(qp: &Value) -> String {
    let attrs = &qp["attrs"];
    match attrs["dest_qpn"].as_u64() {
        Some(qpn @ 1..) if qp["type"] == "RC" => format!("{qpn:#x} at {}", word(&attrs["av"]["dgid"])),
        _ if attrs.is_string() => word(attrs),
        _ => "-".to_owned(),
    }
}

const HANDLE: Column = ("handle", |object| word(&object["handle"]));
const PD: Column = ("PD", |object| word(&object["pd"]));
const CONTEXT: Column = ("context", |object| word(&object["context"]));
const STATE: Column = ("state", |object| word(&object["state"]));
const RING: Column = ("used/size head:tail", |object| ring(&object["ring"]));

fn columns(kind: ObjectKind) -> &'static [Column] {
    match kind {
        ObjectKind::Device => &[],
        ObjectKind::Context => &[HANDLE, ("doorbell page", |context| word(&context["uar_page"]))],
        ObjectKind::Pd => &[HANDLE, CONTEXT],
        ObjectKind::Mr => &[
            HANDLE,
            PD,
            ("kind", |mr| word(&mr["kind"])),
            ("start", |mr| mr["start"].as_u64().map_or_else(|| "-".to_owned(), |start| format!("{start:#x}"))),
            ("length", |mr| {
                mr["length"].as_u64().or_else(|| mr["max_bytes"].as_u64()).map_or_else(|| "-".to_owned(), size)
            }),
            ("rights", |mr| word(&mr["access"]).to_lowercase().replace(" | ", ", ")),
        ],
        ObjectKind::Cq => &[HANDLE, CONTEXT, STATE, RING],
        ObjectKind::Srq => {
            &[HANDLE, PD, ("limit", |srq| word(&srq["limit"])), ("SGEs", |srq| word(&srq["max_sge"])), RING]
        }
        ObjectKind::Qp => &[
            HANDLE,
            ("QPN", |qp| format!("{:#x}", qp["qpn"].as_u64().unwrap_or(0))),
            ("type", |qp| word(&qp["type"])),
            ("state", qp_state),
            ("send used/size head:tail", |qp| ring(&qp["send_ring"])),
            ("receive", |qp| match &qp["srq"] {
                Value::Null => ring(&qp["recv_ring"]),
                srq => format!("SRQ {srq}"),
            }),
            ("path", path),
            ("peer", peer),
        ],
        ObjectKind::Traffic => &[
            ("QPN", |qp| format!("{:#x}", qp["qpn"].as_u64().unwrap_or(0))),
            ("type", |qp| word(&qp["type"])),
            ("state", |qp| word(&qp["state"])),
            ("requests", |qp| word(&qp["progress"]["requests"])),
            ("moved", |qp| qp["progress"]["bytes"].as_u64().map_or_else(|| "-".to_owned(), size)),
            ("path", |qp| word(&qp["progress"]["path"])),
            ("peer", |qp| word(&qp["peer"]["gid"])),
        ],
        ObjectKind::Gid => &[
            ("index", |gid| word(&gid["index"])),
            ("GID", |gid| word(&gid["gid"])),
            ("RoCE", |gid| word(&gid["type"])),
            ("VLAN", |gid| word(&gid["vlan"])),
        ],
        ObjectKind::Migratable => &[("the device cannot move now", word)],
        ObjectKind::Ring => {
            &[("ring", |ring| word(&ring["name"])), STATE, ("waiting", |ring| word(&ring["waiting"])), RING]
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_widest_objects_fit_a_terminal() {
        let ring = json!({"size": 8_388_608, "used": 8_388_608, "head": 16_777_215, "tail": 8_388_607});
        let gid = "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff";
        let object = json!({
            "handle": 65_535, "qpn": 0xff_ffff, "type": "RC", "pd": 16_777_215, "context": 65_535, "srq": null,
            "attrs": {"state": "RESET", "dest_qpn": 0xff_ffff, "av": {"dgid": gid}}, "send_ring": ring, "recv_ring": ring,
            "ring": ring, "state": "armed for solicited", "waiting": 4096, "name": "asynchronous events",
            "kind": "fast_register", "start": u64::MAX, "length": 1 << 30, "limit": 16_384, "max_sge": 128,
            "access": "LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC", "uar_page": 1023,
            "index": 255, "gid": gid, "vlan": 4094,
            "adapter": {"requester": {"route": {"path": "wire", "snd_una": 0xff_fffe, "snd_nxt": 0xff_ffff}}},
        });
        for kind in ObjectKind::ALL {
            let objects = if kind == ObjectKind::Device { object.clone() } else { json!([object]) };
            let text = render_objects(kind, &objects);
            assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        }
    }

    #[test]
    fn a_queue_pair_in_a_line() {
        let ring = json!({"size": 64, "used": 3, "head": 1, "tail": 4});
        let qp = json!({
            "handle": 2, "qpn": 2, "type": "RC", "pd": 0, "srq": 7, "send_ring": ring,
            "attrs": {"state": "RTS", "dest_qpn": 3, "av": {"dgid": "::ffff:10.0.0.2"}},
        });
        let text = render_objects(ObjectKind::Qp, &json!([qp]));
        let line = text.lines().find(|line| line.contains("RTS")).unwrap();
        for part in ["0x2", "3/64 1:4", "SRQ 7", "0x3 at", "::ffff:10.0.0.2"] {
            assert!(line.contains(part), "{part}: {text}");
        }
        assert_eq!(render_objects(ObjectKind::Srq, &json!([])), "no srq\n");
    }

    #[test]
    fn the_path_of_a_queue_pair() {
        let qp = |requester| json!({"attrs": {"state": "RTS"}, "adapter": {"requester": requester}});
        assert_eq!(path(&qp(json!({"route": {"path": "local"}}))), "local");
        assert_eq!(path(&qp(json!({"route": {"path": "wire", "snd_una": 16, "snd_nxt": 18}}))), "wire 0x10:0x12");
        assert_eq!(path(&qp(json!("busy"))), "busy");
        assert_eq!(path(&json!({"adapter": {"state": "RTS", "host_qpn": 7}})), "host");
        assert_eq!(path(&json!({})), "-");
        let busy = json!({"type": "RC", "attrs": "busy", "adapter": {"state": "RTS"}});
        assert_eq!((qp_state(&busy), peer(&busy)), ("RTS".to_owned(), "busy".to_owned()));
    }
}
