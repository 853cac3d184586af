//! Output of `pvrdmad show` about the objects of a guest.

use crate::common::daemon::{Running, TestDaemon};
use pvrdma_dev::{
    ObjectKind,
    testing::{Path, QpInit, RecvWr, SendWr, access},
};
use pvrdma_verbs_types::Gid;
use serde_json::{Value, json};

const GID: Gid = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);

/// Starts a daemon with the device `vm0`.
fn start() -> Running {
    TestDaemon::new().device("vm0", 1, "").start()
}

fn show(daemon: &Running, object: &str) -> Value {
    serde_json::from_str(&daemon.run(&format!("show {object} --device vm0 --json"))).unwrap()
}

#[test]
fn objects_of_a_guest_are_shown() {
    let daemon = start();
    assert_eq!(show(&daemon, "qp"), json!([]));
    assert_eq!(show(&daemon, "device")["phase"], "reset");

    let driver = daemon.probe("vm0");
    driver.bind_gid(3, GID).unwrap();
    let context = driver.open().unwrap();
    let pd = driver.create_pd(Some(&context)).unwrap();
    let cq = driver.create_cq(Some(&context), 64).unwrap();
    let (_buffer, mr) = driver.registered_buffer(&pd, 8192, access::ALL).unwrap();
    let mut qp = driver.create_qp(&QpInit { max_send_wr: 16, max_recv_wr: 32, ..QpInit::rc(&pd, &cq) }).unwrap();
    qp.to_init(access::ALL).unwrap();
    // No device has the peer's address, so the queue pair stays in this state.
    qp.to_rtr(&Path::to(GID, 0x77)).unwrap();
    qp.publish_recv(&[RecvWr::new(1, &[]), RecvWr::new(2, &[]), RecvWr::new(3, &[])]).unwrap();

    let device = show(&daemon, "device");
    assert_eq!((&device["phase"], &device["name"]), (&json!("active"), &json!("vm0")));
    assert_eq!((&device["objects"]["qps"], &device["objects"]["mrs"]), (&json!(1), &json!(1)));
    assert_eq!((&device["limits"]["max_qp"], &device["limits"]["gid_table"]), (&json!(16_384), &json!(256)));
    let gids = json!([{"index": 3, "gid": "fe80::1", "type": "v2", "vlan": null}]);
    assert_eq!(show(&daemon, "gid"), gids);

    let shown = show(&daemon, "qp")[0].clone();
    assert_eq!(
        (&shown["qpn"], &shown["type"], &shown["attrs"]["state"]),
        (&json!(qp.qpn), &json!("RC"), &json!("RTR"))
    );
    assert_eq!((&shown["attrs"]["dest_qpn"], &shown["attrs"]["av"]["dgid"]), (&json!(0x77), &json!("fe80::1")));
    assert_eq!(shown["send_ring"], json!({"size": 16, "head": 0, "tail": 0, "used": 0}));
    assert_eq!(shown["recv_ring"], json!({"size": 32, "head": 0, "tail": 3, "used": 3}));
    assert!(shown["attrs"].get("qkey").is_none(), "{shown}");
    assert_eq!(
        show(&daemon, "traffic"),
        json!([{
            "qpn": qp.qpn, "type": "RC", "state": "RTR", "peer": {"qpn": 0x77, "gid": "fe80::1"},
            "send_ring_used": 0, "send_ring_size": 16,
            "progress": {"requests": 0, "bytes": 0, "retries_left": 0, "path": "unresolved"},
        }])
    );
    let cq = show(&daemon, "cq")[0].clone();
    assert_eq!((&cq["ring"]["size"], &cq["ring"]["used"], &cq["state"]), (&json!(64), &json!(0), &json!("not armed")));
    let region = show(&daemon, "mr")[0].clone();
    assert_eq!((&region["kind"], &region["length"], &region["pd"]), (&json!("user"), &json!(8192), &shown["pd"]));
    assert!(region.get("lkey").is_none() && region.get("rkey").is_none(), "{region}");
    let rings = show(&daemon, "ring");
    assert_eq!((&rings[0]["state"], &rings[1]["name"]), (&json!("open"), &json!("CQ notifications")));

    for object in ObjectKind::ALL.map(ObjectKind::name) {
        let text = daemon.run(&format!("show {object} --device vm0"));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    let text = daemon.run("status");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let table = daemon.run("show qp --device vm0");
    assert!(table.contains("RTR") && table.contains("3/32 0:3") && table.contains("fe80::1"), "{table}");

    qp.destroy().unwrap();
    mr.destroy().unwrap();
    assert_eq!((show(&daemon, "qp"), show(&daemon, "mr")), (json!([]), json!([])));
}

#[test]
fn a_way_to_a_peer_of_this_process() {
    let daemon = start();
    let driver = daemon.probe("vm0");
    driver.bind_gid(0, GID).unwrap();
    let pd = driver.create_pd(None).unwrap();
    let mut cq = driver.create_cq(None, 64).unwrap();
    let [mut left, mut right] = [(); 2].map(|()| driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap());
    left.connect(&Path::to(GID, right.qpn)).unwrap();
    right.connect(&Path::to(GID, left.qpn)).unwrap();
    let of = |qpn: u32| {
        let shown = show(&daemon, "qp");
        shown.as_array().unwrap().iter().find(|qp| qp["qpn"] == qpn).unwrap().clone()
    };

    right.post_recv(&[RecvWr::new(1, &[])]).unwrap();
    left.post_send(&[SendWr::send(2, &[])]).unwrap();
    assert_eq!(cq.wait_many(2).len(), 2);
    let (sender, receiver) = (of(left.qpn), of(right.qpn));
    let route = &sender["adapter"]["requester"]["route"];
    assert_eq!((&route["path"], &route["peer"]), (&json!("local"), &json!({"device": "vm0", "qpn": right.qpn})));
    assert_eq!(sender["attrs"]["sq_psn"], json!(0x1234), "{sender}");
    assert_eq!((&sender["send_ring"]["head"], &sender["send_ring"]["tail"]), (&json!(1), &json!(1)), "{sender}");
    assert_eq!((&receiver["recv_ring"]["head"], &receiver["recv_ring"]["used"]), (&json!(1), &json!(0)), "{receiver}");
    assert_eq!(receiver["adapter"]["responder"]["established"], true, "{receiver}");
    let table = daemon.run("show qp --device vm0");
    assert!(table.contains("local") && table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let qps = &show(&daemon, "cq")[0]["adapter"]["qps"];
    assert_eq!(*qps, json!([left.qpn, right.qpn]));
    assert_eq!(show(&daemon, "device")["backend"]["gids"][0]["gid"], json!("fe80::1"));
}

#[test]
fn mistakes_are_named() {
    let daemon = start();
    let text = daemon.try_run("show qp --device vm9").unwrap_err();
    assert!(text.contains("there is no device 'vm9'"), "{text}");
}
