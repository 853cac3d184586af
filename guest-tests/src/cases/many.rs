//! Many users of one device at a time.

use std::time::Duration;

use anyhow::Result;

use super::case::Case;
use super::exchange::{Programs, Ready, finish};
use super::perftest;
use crate::pair::{Link, Pair};

/// Two processes, two hundred queue pairs, and a guest that talks to itself.
pub(crate) fn cases() -> Vec<Case> {
    vec![
        Case::new("many/two-processes", two_processes),
        Case::new("many/200-qps", |pair, link| {
            perftest::run(&pair.endpoints(link), 1, "ib_write_bw", "-q 200 -n 10 -s 4096")
                .map(|rows| perftest::bandwidth_note(&rows))
        }),
        Case::new("many/same-guest", same_guest),
    ]
}

fn two_processes(pair: &mut Pair, link: &Link) -> Result<String> {
    let ports = [18515, 18516];
    let programs = ports.map(|port| {
        let command = |vm: usize| {
            format!("ib_send_bw -F -d {} -x {} -p {port} -n 2000 -s 16384", link.device, link.gid_index[vm])
        };
        Programs {
            server_vm: pair.b(),
            server: command(1),
            ready: Ready::Tcp(port),
            client_vm: pair.a(),
            client: format!("{} {}", command(0), link.ip[1]),
            timeout: Duration::from_secs(120),
        }
    });
    let servers = [programs[0].start_server()?, programs[1].start_server()?];
    let clients = [pair.a().spawn(&programs[0].client)?, pair.a().spawn(&programs[1].client)?];
    for (server, client) in servers.iter().zip(&clients) {
        finish(server, client, Duration::from_secs(120))?;
    }
    Ok(String::new())
}

fn same_guest(pair: &mut Pair, link: &Link) -> Result<String> {
    let command = format!("ib_write_bw -F -d {} -x {} -n 100 -s 65536", link.device, link.gid_index[0]);
    Programs {
        server_vm: pair.a(),
        server: command.clone(),
        ready: Ready::Tcp(18515),
        client_vm: pair.a(),
        client: format!("{command} {}", link.ip[0]),
        timeout: Duration::from_secs(120),
    }
    .run()?;
    Ok(String::new())
}
