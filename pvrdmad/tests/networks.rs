//! Two tenants of one daemon, in separate networks with equal addresses: each tenant's traffic stays in its network.

use crate::common::daemon::{Running, TestDaemon};
use crate::common::traffic::{Guest, gid, mac, transfer};
use pvrdma_dev::testing::{CommandError, Path, QpInit, RecvWr, Request, SendWr, access, command_id, status};

/// Values of `--isolate`.
const ISOLATION: [&str; 2] = ["network", "none"];
/// Size of the memory under attack in bytes.
const LENGTH: usize = 64;

/// A daemon with two networks, whose guests have the same numbers and so the same addresses.
struct Host {
    red: Vec<Guest>,
    blue: Vec<Guest>,
    _daemon: Running,
}

impl Host {
    /// Starts the daemon. `red` and `blue` are further keys of the networks of these names.
    fn start(isolate: &str, red: &str, blue: &str, numbers: &[u8]) -> Self {
        let mut daemon = TestDaemon::new().isolate(isolate).network("red", red).network("blue", blue);
        for network in ["red", "blue"] {
            for &number in numbers {
                let keys = format!("network={network},seed={number},address=any");
                daemon = daemon.device(&format!("{network}{number}"), number, &keys);
            }
        }
        let daemon = daemon.start();
        let guest = |network: &str, number| daemon.guest(&format!("{network}{number}"), number);
        let guests = |network| numbers.iter().map(|&number| guest(network, number)).collect();
        Self { red: guests("red"), blue: guests("blue"), _daemon: daemon }
    }
}

/// Connects the victim to the address and queue pair of `attacker`, which writes and sends to it. Returns `true` if
/// both reach the victim; otherwise neither may.
fn shoot(attacker: &Guest, victim: &Guest) -> bool {
    let driver = &victim.driver;
    let (pd, mut cq) = (driver.create_pd(None).unwrap(), driver.create_cq(None, 16).unwrap());
    let mut open = driver.create_qp(&QpInit::rc(&pd, &cq)).unwrap();
    let all = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;
    let (secret, mr) = driver.registered_buffer(&pd, LENGTH, all).unwrap();
    let secrets = vec![0x5e; LENGTH];
    secret.write(0, &secrets);

    let (their_pd, mut their_cq) =
        (attacker.driver.create_pd(None).unwrap(), attacker.driver.create_cq(None, 16).unwrap());
    let mut shot = attacker.driver.create_qp(&QpInit::rc(&their_pd, &their_cq)).unwrap();
    let (mine, my_mr) = attacker.driver.registered_buffer(&their_pd, LENGTH, all).unwrap();
    mine.write(0, &[0xa7; LENGTH]);
    open.connect(&Path { dmac: mac(attacker.number), ..Path::to(gid(attacker.number), shot.qpn) }).unwrap();
    open.post_recv(&[RecvWr::new(1, &[])]).unwrap();
    let quick = Path { dmac: mac(victim.number), timeout: 10, retry_cnt: 1, ..Path::to(gid(victim.number), open.qpn) };
    shot.connect(&quick).unwrap();
    let whole = [mine.sge(&my_mr, 0, LENGTH)];
    let remote = secret.sge(&mr, 0, LENGTH).addr;
    shot.post_send(&[SendWr::write(1, &whole, remote, mr.rkey), SendWr::send(2, &[])]).unwrap();
    let results: Vec<_> = their_cq.wait_many(2).iter().map(|cqe| cqe.status).collect();
    let hit = results == [status::SUCCESS; 2];
    // A hit causes a completion at the victim; a miss has had enough time to cause one.
    let received = if hit { Some(cq.wait().wr_id) } else { cq.poll().map(|cqe| cqe.wr_id) };
    assert_eq!((received == Some(1), secret.read(0, LENGTH) != secrets), (hit, hit), "{results:?}");
    hit
}

/// Sends CREATE_BIND with a VLAN.
fn bind_in_vlan(guest: &Guest, vlan: u32) -> Result<(), CommandError> {
    let request = Request::new(command_id::CREATE_BIND).u32(16, 1024).u32(20, vlan).u32(24, 3);
    guest.driver.execute(&request.set(28, &gid(9).0).u8(44, guest.driver.gid_type())).map(drop)
}

/// Attacks within a host: writes into another network, use of its addresses, and use of a VLAN.
#[test]
fn two_networks_of_one_host_are_isolated() {
    for isolate in ISOLATION {
        // In the other network, the second guest can bind the address of the first one.
        let host = Host::start(isolate, "", "", &[1, 2]);
        let (red, blue) = (&host.red, &host.blue);
        for _ in 0..3 {
            assert_eq!(transfer(&red[0], &red[1], 5), transfer(&blue[0], &blue[1], 5), "numbers of QPs are equal");
            assert_eq!(transfer(&red[1], &red[0], 5), transfer(&blue[1], &blue[0], 5), "numbers of QPs are equal");
        }
        assert!(shoot(&red[0], &red[1]) && !shoot(&blue[0], &red[1]), "{isolate}");
        assert!(shoot(&blue[0], &blue[1]) && !shoot(&red[0], &blue[1]), "{isolate}");
        for vlan in [1, 99, 4094] {
            assert!(matches!(bind_in_vlan(&red[0], vlan), Err(CommandError::Refused(_))), "{vlan}");
        }
        bind_in_vlan(&red[0], 0xfff).unwrap();
    }
}

/// Attacks over the wire: a remote guest is reachable only from its own network, and keeps its address there, whatever
/// addresses guests of other networks bind.
#[test]
fn two_networks_on_the_wire_are_isolated() {
    // Addresses that no other process has.
    let [.., high, low] = std::process::id().to_be_bytes();
    for (isolate, first) in ISOLATION.into_iter().zip([20, 22]) {
        // Workers of killed daemons exit a little later and hold their sockets until then, so each round has its own
        // addresses.
        let end = |host: u8| format!("127.{}.{low}.{}", 64 | high & 0x3f, first + host);
        let tunnel = |host: u8, network: u8| {
            // The tunnels of both networks have the same end point; only the VNI differs.
            let (ours, theirs) = (end(host), end(1 - host));
            format!("uplink=vxlan:{ours},remote={theirs},vni={},mtu=9000", 7 + network)
        };
        let [near, far] = [0, 1].map(|host| Host::start(isolate, &tunnel(host, 0), &tunnel(host, 1), &[1 + host]));
        let (near_red, near_blue) = (&near.red[0], &near.blue[0]);
        let (far_red, far_blue) = (&far.red[0], &far.blue[0]);
        for _ in 0..2 {
            assert_eq!(transfer(near_red, far_red, 5), transfer(near_blue, far_blue, 5), "numbers of QPs are equal");
            assert_eq!(transfer(far_red, near_red, 5), transfer(far_blue, near_blue, 5), "numbers of QPs are equal");
        }
        assert!(shoot(near_red, far_red) && !shoot(near_blue, far_red), "{isolate}");
        assert!(shoot(far_blue, near_blue) && !shoot(far_red, near_blue), "{isolate}");
        // A guest binds the address of the remote host. This is allowed in its own network.
        near_blue.driver.bind_gid(1, gid(2)).unwrap();
        transfer(near_red, far_red, 5);
        assert!(shoot(near_red, far_red), "{isolate}");
    }
}
