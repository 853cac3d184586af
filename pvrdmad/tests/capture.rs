//! Captures through the control socket, of a device whose uplink is the test.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::common::daemon::{Running, TestDaemon};
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::blocks::interface_description::InterfaceDescriptionOption;
use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use rustix::process::{Pid, Signal, kill_process};

/// Starts a capture on the connection that it is sent over.
const CALL: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"capture\",\"params\":{\"device\":\"vm0\"}}\n";

/// A command that is killed when dropped.
struct Killed(Child);

impl Killed {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    fn wait(&mut self) -> bool {
        self.0.wait().unwrap().success()
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A daemon with one device, and the other end of its uplink.
struct Bench {
    daemon: Running,
    network: UnixStream,
}

impl Bench {
    fn new() -> Self {
        let daemon = TestDaemon::new().network("default", "uplink=unix:FOLDER/uplink").device("vm0", 1, "").start();
        let network = UnixStream::connect(daemon.path("uplink")).unwrap();
        Self { daemon, network }
    }

    /// Puts a frame on the uplink. No device has its destination, but a capture shows it.
    fn frame(&self, number: u32) {
        let mut frame = vec![0xff; 60];
        frame[56..].copy_from_slice(&number.to_be_bytes());
        let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
        (&self.network).write_all(&[&length[..], &frame].concat()).unwrap();
    }

    fn capture(&self, arguments: &str) -> Command {
        self.daemon.command(&format!("capture --device vm0 {arguments}"))
    }

    /// Starts a capture that writes to a pipe. Its output begins once the capture runs.
    fn begun(&self) -> (Killed, ChildStdout) {
        let mut child = self.capture("-w -").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let output = child.stdout.take().unwrap();
        (Killed(child), output)
    }
}

/// Content of a capture file.
#[derive(Debug, Default, PartialEq)]
struct Content {
    interfaces: Vec<String>,
    /// For each frame: interface, flags, length on the wire, and its last four bytes.
    frames: Vec<(u32, u32, u32, u32)>,
    /// Frames seen and dropped, by interface.
    statistics: Vec<(u64, u64)>,
}

fn content(file: impl Read) -> Content {
    let mut reader = PcapNgReader::new(file).unwrap();
    let mut content = Content::default();
    while let Some(block) = reader.next_block() {
        match block.unwrap() {
            Block::InterfaceDescription(block) => {
                assert!(block.options.contains(&InterfaceDescriptionOption::IfTsResol(9)));
                content.interfaces.extend(block.options.iter().find_map(|option| match option {
                    InterfaceDescriptionOption::IfName(name) => Some(name.to_string()),
                    _ => None,
                }));
            }
            Block::EnhancedPacket(block) => {
                let flags = block.options.iter().find_map(|option| match option {
                    EnhancedPacketOption::Flags(flags) => Some(*flags),
                    _ => None,
                });
                let tail = u32::from_be_bytes(*block.data.last_chunk().unwrap());
                content.frames.push((block.interface_id, flags.unwrap(), block.original_len, tail));
            }
            Block::InterfaceStatistics(block) => {
                let value = |wanted: fn(&InterfaceStatisticsOption<'_>) -> Option<u64>| {
                    block.options.iter().find_map(wanted).unwrap()
                };
                content.statistics.push((
                    value(|option| match option {
                        InterfaceStatisticsOption::IsbIfRecv(count) => Some(*count),
                        _ => None,
                    }),
                    value(|option| match option {
                        InterfaceStatisticsOption::IsbIfDrop(count) => Some(*count),
                        _ => None,
                    }),
                ));
            }
            other => panic!("{other:?}"),
        }
    }
    content
}

#[test]
fn a_signal_ends_a_capture_with_a_whole_file() {
    for signal in [Signal::INT, Signal::TERM] {
        let bench = Bench::new();
        let (mut client, mut output) = bench.begun();
        // The file header arrives at once.
        let mut head = [0; 4];
        output.read_exact(&mut head).unwrap();
        for number in 0..3 {
            bench.frame(number);
        }
        // Reads until all blocks have arrived: the header, two interfaces and three frames.
        let mut file = head.to_vec();
        while content_so_far(&file) < 6 {
            let mut more = [0; 1000];
            let count = output.read(&mut more).unwrap();
            file.extend_from_slice(&more[..count]);
        }
        client.signal(signal);
        output.read_to_end(&mut file).unwrap();
        assert!(client.wait());
        let content = content(&file[..]);
        assert_eq!(content.interfaces, ["vm0-uplink", "vm0-local"]);
        assert_eq!(content.frames, [0, 1, 2].map(|number| (0, 1, 60, number)));
        assert_eq!(content.statistics, [(3, 0), (0, 0)]);
    }
}

/// Returns the number of complete blocks at the start of a file.
fn content_so_far(file: &[u8]) -> usize {
    let (mut blocks, mut rest) = (0, file);
    while let Some((head, _)) = rest.split_first_chunk::<8>() {
        let length = u32::from_be_bytes(*head.last_chunk().unwrap()) as usize;
        let Some(after) = rest.get(length..) else { break };
        (blocks, rest) = (blocks + 1, after);
    }
    blocks
}

#[test]
fn a_capture_ends_when_it_has_enough() {
    let bench = Bench::new();
    let path = bench.daemon.path("out.pcapng");
    let file = path.display().to_string();
    let mut client =
        Killed(bench.capture(&format!("-w {file} --count 5 --snaplen 20")).stderr(Stdio::null()).spawn().unwrap());
    // The start of the capture cannot be observed, so frames are sent until it has five and ends.
    let mut number = 0;
    while client.0.try_wait().unwrap().is_none() {
        bench.frame(number);
        number += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(client.wait());
    let content = content(File::open(&path).unwrap());
    assert_eq!(content.frames, [(0, 1, 60, u32::MAX); 5]);
    assert!(content.statistics[0].0 >= 5);
    // Only the owner may read the file, because it contains guest memory.
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    // The capture ends after this time, whether or not frames arrive.
    let output = bench.capture(&format!("-w {file} --seconds 1")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "0 frames\n");
}

#[test]
fn a_reader_that_stalls_only_loses_frames() {
    let mut bench = Bench::new();
    let control = UnixStream::connect(bench.daemon.path("control")).unwrap();
    (&control).write_all(CALL).unwrap();
    let mut input = BufReader::new(control.try_clone().unwrap());
    let mut answer = String::new();
    input.read_line(&mut answer).unwrap();
    assert_eq!(answer, "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n");
    let mut sent = 0;
    let capture = loop {
        for _ in 0..10_000 {
            bench.frame(sent);
            sent += 1;
        }
        let capture = bench.daemon.report("vm0")["capture"].clone();
        if capture["dropped"].as_u64().unwrap() > 0 {
            break capture;
        }
    };
    assert_eq!(capture["active"], 1);
    let table = bench.daemon.run("status");
    assert!(table.contains("1 captures") && table.contains("dropped ("), "{table}");
    assert!(table.contains("passed in"), "{table}");
    // Ends the capture. The remaining frames arrive, and the statistics count those that were dropped.
    control.shutdown(std::net::Shutdown::Write).unwrap();
    let content = content(input);
    let (seen, dropped) = content.statistics[0];
    assert_eq!(content.frames.len() as u64, seen - dropped);
    assert!(content.frames.iter().map(|frame| frame.3).is_sorted());
    assert!(dropped > 0 && seen <= u64::from(sent));
    // A second client does not read either, while the daemon ends.
    let control = UnixStream::connect(bench.daemon.path("control")).unwrap();
    (&control).write_all(CALL).unwrap();
    let mut head = [0; 20];
    (&control).read_exact(&mut head).unwrap();
    for number in 0..100_000 {
        bench.frame(number);
    }
    bench.daemon.signal(Signal::TERM);
    assert_eq!(bench.daemon.exit(), Some(0));
}

#[test]
fn the_end_of_the_daemon_ends_a_capture() {
    let mut bench = Bench::new();
    let (mut client, mut output) = bench.begun();
    output.read_exact(&mut [0; 4]).unwrap();
    bench.daemon.signal(Signal::TERM);
    assert_eq!(bench.daemon.exit(), Some(0));
    output.read_to_end(&mut Vec::new()).unwrap();
    assert!(client.wait());
}

#[test]
fn mistakes_are_explained() {
    let bench = Bench::new();
    let out = bench.daemon.path("out").display().to_string();
    let fails = |command: &mut Command, part: &str| {
        let output = command.output().unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && message.contains(part), "{message}");
    };
    fails(&mut bench.daemon.command(&format!("capture --device vm9 -w {out}")), "there is no device 'vm9'");
    assert!(!bench.daemon.path("out").exists());
    fails(&mut bench.capture("-w /nonexistent/out"), "/nonexistent/out");
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (client, mut output) = bench.begun();
            output.read_exact(&mut [0; 4]).unwrap();
            (client, output)
        })
        .collect();
    fails(&mut bench.capture(&format!("-w {out}")), "captures of this device");
    drop(clients);
}
