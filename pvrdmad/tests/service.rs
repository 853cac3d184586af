//! The program as a service: readiness, watchdog, reload, and sockets that are passed on.

use std::fs;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::daemon::{PROGRAM, Running, TestDaemon};
use rustix::io::retry_on_intr;
use rustix::net::{RecvFlags, recv};
use rustix::process::Signal;
use serde_json::Value;
use vfio_user::Client;

/// Longer than any step takes; a test that waits for this long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon that has not been started yet, and the socket at which it will report its state, as to systemd.
struct Place {
    setup: TestDaemon,
    manager: UnixDatagram,
}

impl Place {
    fn new() -> Self {
        let setup = TestDaemon::new().env("NOTIFY_SOCKET", "FOLDER/notify").stdout(Stdio::null);
        let manager = UnixDatagram::bind(setup.path("notify")).unwrap();
        manager.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { setup, manager }
    }

    /// With a configuration file, see [`configure`].
    fn configured(text: &str, devices: &[(u8, &str)]) -> Self {
        let Self { setup, manager } = Self::new();
        configure(setup.folder(), text, devices);
        Self { setup: setup.without_control().arg("--config=FOLDER/config.toml"), manager }
    }

    /// The service manager expects messages within this time, in microseconds.
    fn watchdog(self, time: &str) -> Self {
        Self { setup: self.setup.env("WATCHDOG_USEC", time), ..self }
    }

    /// Passes a listening socket as descriptor 3, by a shell.
    fn activated(self, listener: &UnixListener, names: &str) -> Self {
        let script = format!("LISTEN_PID=$$ LISTEN_FDS=1 {names} exec \"$0\" \"$@\" 3<&0 0</dev/null");
        let passed = OwnedFd::from(listener.try_clone().unwrap());
        Self { setup: self.setup.through(&["sh", "-c", &script]).stdin(passed), ..self }
    }

    fn arg(self, argument: &str) -> Self {
        Self { setup: self.setup.arg(argument), ..self }
    }

    /// Starts the daemon, without waiting until it is ready.
    fn start(self) -> Service {
        Service { daemon: self.setup.start(), manager: self.manager }
    }

    /// Starts the daemon and waits until it is ready.
    fn start_ready(self) -> Service {
        let service = self.start();
        service.wait("READY=1");
        service
    }
}

/// Writes the configuration: other text, and numbered devices with further keys. `FOLDER` stands for the folder.
fn configure(folder: &Path, text: &str, devices: &[(u8, &str)]) {
    let mut file = format!("control = 'FOLDER/control'\n{text}\n");
    for (number, more) in devices {
        file += &format!(
            "[[device]]\nname = 'vm{number}'\nsocket = 'FOLDER/vm{number}'\nmac = '52:54:00:00:00:0{number}'\n\
             pin = 'off'\n{more}\n",
        );
    }
    fs::write(folder.join("config.toml"), file.replace("FOLDER", &folder.display().to_string())).unwrap();
}

struct Service {
    daemon: Running,
    manager: UnixDatagram,
}

impl Deref for Service {
    type Target = Running;

    fn deref(&self) -> &Running {
        &self.daemon
    }
}

impl Service {
    fn configure(&self, text: &str, devices: &[(u8, &str)]) {
        configure(self.folder(), text, devices);
    }

    /// The next message to the manager.
    fn message(&self) -> String {
        let mut buffer = [0; 4096];
        // A socket with a timeout returns EINTR after this process was stopped and continued: signal(7).
        let (length, _) = retry_on_intr(|| recv(&self.manager, &mut buffer[..], RecvFlags::empty())).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    /// Waits until the service reports this word. Returns the message.
    fn wait(&self, word: &str) -> String {
        loop {
            let message = self.message();
            if message.lines().any(|line| line.starts_with(word)) {
                return message;
            }
        }
    }

    /// Makes the daemon reload its configuration. Returns the message that ends the reload.
    fn reload(&self) -> String {
        self.signal(Signal::HUP);
        let begun = self.wait("RELOADING=1");
        assert!(begun.contains("MONOTONIC_USEC="), "systemd wants to know when: {begun}");
        self.wait("READY=1")
    }

    /// Devices with their networks.
    fn devices(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let status = self.status();
        let devices = status["devices"].as_array().unwrap();
        devices.iter().map(|device| (text(&device["name"]), text(&device["network"]["name"]))).collect()
    }
}

fn names(devices: &[(String, String)]) -> Vec<&str> {
    devices.iter().map(|(name, _)| name.as_str()).collect()
}

/// Returns `true` if the other end has not closed the connection.
fn is_open(stream: &UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    matches!((&*stream).read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn ready_when_all_sockets_listen() {
    let mut service = Place::configured("", &[(1, ""), (2, "")]).watchdog("300000").start();
    let first = service.message();
    // The sockets accept connections when readiness is reported, not some time later.
    let connected = ["vm1", "vm2", "control"].map(|name| UnixStream::connect(service.path(name)).is_ok());
    assert_eq!(connected, [true; 3]);
    assert!(first.starts_with("READY=1\nSTATUS=devices: 2; networks: 1\n"), "{first}");
    for _ in 0..3 {
        service.wait("WATCHDOG=1");
    }
    service.signal(Signal::TERM);
    service.wait("STOPPING=1");
    assert_eq!(service.daemon.exit(), Some(0));
}

/// Without a watchdog interval in its environment, the service sends no watchdog messages.
#[test]
fn the_watchdog_is_silent_by_default() {
    let service = Place::configured("", &[(1, "")]).start_ready();
    service.signal(Signal::TERM);
    assert_eq!(service.message(), "STOPPING=1\n");
}

/// The old main process names the next one, which then reports for itself. A reload compares with the configuration of
/// the first start, and the metrics and the control socket stay.
#[test]
fn the_next_daemon_becomes_the_main_process() {
    let metrics = "metrics = 'unix:FOLDER/metrics'";
    let mut service = Place::configured(metrics, &[(1, ""), (2, "")]).watchdog("300000").start_ready();
    service.run("upgrade --daemon");
    let main = service.wait("MAINPID=");
    let next = service.status()["pid"].as_i64().unwrap();
    assert_eq!(main, format!("MAINPID={next}\n"));
    let first = service.wait("READY=1");
    assert!(first.starts_with("READY=1\nSTATUS=devices: 2; networks: 1\n"), "{first}");
    service.wait("WATCHDOG=1");
    assert_eq!(service.daemon.exit(), Some(0));
    let next = rustix::process::Pid::from_raw(i32::try_from(next).unwrap()).unwrap();
    let tell = |signal| rustix::process::kill_process(next, signal).unwrap();
    // The sockets still exist, and one device is gone from the file.
    UnixStream::connect(service.path("metrics")).unwrap();
    service.configure(metrics, &[(2, "")]);
    tell(Signal::HUP);
    service.wait("RELOADING=1");
    let reloaded = service.wait("READY=1");
    assert!(reloaded.contains("STATUS=devices: 1; networks: 1\n"), "{reloaded}");
    assert_eq!((service.path("vm1").exists(), service.path("vm2").exists()), (false, true));
    tell(Signal::TERM);
    service.wait("STOPPING=1");
    while service.path("vm2").exists() || service.path("metrics").exists() {
        std::thread::yield_now();
    }
}

#[test]
fn a_reload_is_a_difference() {
    let service = Place::configured("", &[(1, ""), (2, "")]).start_ready();
    let clients = [1, 2].map(|number| UnixStream::connect(service.path(&format!("vm{number}"))).unwrap());
    assert!(service.reload().contains("STATUS=devices: 2; networks: 1\n"));

    // One device is added to the running network, and two to a new network, which is created with the first of them.
    let red = "[[network]]\nname = 'red'\n[[network]]\nname = 'empty'";
    service.configure(red, &[(1, ""), (2, ""), (3, ""), (4, "network = 'red'"), (5, "network = 'red'")]);
    assert!(service.reload().contains("STATUS=devices: 5; networks: 3\n"));
    let devices = service.devices();
    assert_eq!(names(&devices), ["vm1", "vm2", "vm3", "vm4", "vm5"]);
    assert_eq!((devices[2].1.as_str(), devices[4].1.as_str()), ("default", "red"));
    for number in 3..=5 {
        UnixStream::connect(service.path(&format!("vm{number}"))).unwrap();
    }

    // A device that was added by command stays. Devices that are gone from the file are removed, with their network.
    service.add("vm9", 9, "").unwrap();
    service.configure("", &[(1, ""), (3, "")]);
    assert!(service.reload().contains("STATUS=devices: 2; networks: 1\n"));
    assert_eq!(names(&service.devices()), ["vm1", "vm3", "vm9"]);
    assert_eq!(service.status()["networks"].as_array().unwrap().len(), 1);
    assert!(!service.path("vm2").exists() && !service.path("vm4").exists());
    assert!(is_open(&clients[0]), "a device that stays has lost its client");
    // The worker closes the client's connection before it confirms the removal.
    clients[1].set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!((&clients[1]).read_to_end(&mut Vec::new()).unwrap(), 0);
}

#[test]
fn a_reload_that_fails_changes_nothing() {
    let service = Place::configured("", &[(1, ""), (2, "")]).start_ready();
    let client = UnixStream::connect(service.path("vm1")).unwrap();
    let before = service.devices();
    let fails = |text: &str, devices: &[(u8, &str)], word: &str| {
        service.configure(text, devices);
        let said = service.reload();
        assert!(said.contains("the last reload failed") && said.contains(word), "wanted {word}: {said}");
        assert_eq!(service.devices(), before, "{word}");
        assert!(is_open(&client), "{word}");
    };
    fails("backend =", &[(1, "")], "config.toml");
    fails("[[network]]\nname = 'a'\nspeed = 9", &[(1, "")], "speed");
    fails("captures = 'off'", &[(1, ""), (2, "")], "captures: it cannot change while the daemon runs");
    fails("", &[(1, "mtu = 9000"), (2, "")], "`mtu` is a key of a network");
    fails("", &[(1, "roce = 'v1'"), (2, "")], "device vm1: it runs and is described differently");
    fails("[[network]]\nname = 'red'", &[(1, "network = 'red'"), (2, "")], "device vm1: it runs");
    fails("[[network]]\nname = 'default'\npeers = ['10.0.0.0/8']", &[(1, ""), (2, "")], "network default: it runs");
    // The last of several additions fails: the earlier ones are undone, and devices that are gone from the file still
    // run.
    fs::write(service.path("vm4"), "not a socket").unwrap();
    let red = "[[network]]\nname = 'red'";
    fails(red, &[(1, ""), (3, "network = 'red'"), (4, "network = 'red'")], "exists and is not a socket");
    assert_eq!(service.status()["networks"].as_array().unwrap().len(), 1);
    assert!(!service.path("vm3").exists());
    // The failed reload has left nothing in the way.
    fs::remove_file(service.path("vm4")).unwrap();
    assert!(service.reload().contains("STATUS=devices: 3; networks: 2\n"));
    assert_eq!(names(&service.devices()), ["vm1", "vm3", "vm4"]);
}

/// Returns the inode numbers of a process's sockets.
fn sockets_of(pid: u64) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let targets = entries.map(|entry| fs::read_link(entry.unwrap().path()));
    // A descriptor may be closed meanwhile.
    targets
        .flatten()
        .map(|target| target.display().to_string())
        .filter(|target| target.starts_with("socket:"))
        .collect()
}

#[test]
fn sockets_that_were_passed_on() {
    for (names, place_of_socket) in [("", "fd:3"), ("LISTEN_FDNAMES=vm1", "fd:vm1")] {
        let place = Place::new();
        let path = place.setup.path("activated");
        let listener = UnixListener::bind(&path).unwrap();
        let inode = format!("socket:[{}]", rustix::fs::fstat(&listener).unwrap().st_ino);
        let device = format!("--device=name=vm1,socket={place_of_socket},mac=52:54:00:00:00:01,pin=off");
        let other = "--device=name=vm2,socket=FOLDER/vm2,mac=52:54:00:00:00:02,pin=off,network=red";
        let place = place.activated(&listener, names).arg(&device).arg("--network=name=red").arg(other);
        let mut service = place.start_ready();
        Client::new(&path).unwrap();
        let status = service.status();
        let devices = status["devices"].as_array().unwrap();
        let device = devices.iter().find(|device| device["name"] == "vm1").unwrap();
        assert_eq!(device["socket"], place_of_socket);
        // Each socket is known only to the process of its own network.
        let pid = |index: usize| status["networks"][index]["pid"].as_u64().unwrap();
        let has = [0, 1].map(|index| sockets_of(pid(index)).contains(&inode));
        let of_the_other = usize::from(status["networks"][0]["name"] != "red");
        assert_eq!((has[of_the_other], has[1 - of_the_other]), (false, true));
        // A device that is added later has no passed socket.
        let late = service.try_run("add name=vm3,socket=fd:4,mac=52:54:00:00:00:03").unwrap_err();
        assert!(late.contains("no such descriptor was passed"), "{late}");
        service.daemon.stop();
        assert!(path.exists(), "the socket's file is not ours");
    }
}

#[test]
fn unusable_descriptors_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |listener: &UnixListener, device: &str, word: &str| {
        let place = Place::new().activated(listener, "").arg(&format!("--device={device}"));
        let output = place.setup.command().output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(word), "wanted {word}: {said}");
    };
    let listener = UnixListener::bind(folder.path().join("activated")).unwrap();
    let mac = "mac=52:54:00:00:00:01,pin=off";
    let own = format!("name=vm1,socket={},{mac}", folder.path().join("vm1").display());
    refused(&listener, &own, "descriptor 3 is no device's");
    refused(&listener, &format!("name=vm1,socket=fd:4,{mac}"), "no such descriptor was passed");
    refused(&listener, &format!("name=vm1,socket=fd:3,nic-socket=fd:3,{mac}"), "fd:3 is also");
    let datagrams = UnixDatagram::unbound().unwrap();
    refused(&OwnedFd::from(datagrams).into(), &own, "no Unix stream socket");
    let (stream, _other) = UnixStream::pair().unwrap();
    refused(&OwnedFd::from(stream).into(), &own, "does not listen");
    assert!(!folder.path().join("vm1").exists());
}

#[test]
fn a_check_opens_nothing() {
    let check = |folder: &Path| {
        let output = Command::new(PROGRAM).arg("check").arg("--config").arg(folder.join("config.toml")).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let place = Place::configured("", &[(1, ""), (2, "")]);
    let (status, text) = check(place.setup.folder());
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("device vm2: socket ") && text.contains("control socket "), "{text}");
    assert!(!place.setup.path("vm1").exists() && !place.setup.path("control").exists());
    // The same while the daemon runs.
    let mut service = place.start_ready();
    let (status, text) = check(service.folder());
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("warning: device vm1: socket: "), "{text}");
    service.daemon.kill();
    fs::remove_file(service.path("vm2")).unwrap();
    fs::create_dir(service.path("vm2")).unwrap();
    let (status, text) = check(service.folder());
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("error: device vm2: socket: ") && text.contains("is not a socket"), "{text}");
    service.configure("speed = 9", &[(1, "")]);
    assert_eq!(check(service.folder()).0, Some(2));
}

/// libvirt's XML name space for arguments of QEMU.
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// The domain XML names the functions of the device, also with unusual characters in their paths.
#[test]
fn a_domain_for_libvirt() {
    let service = Place::configured("", &[(1, "nic-socket = \"FOLDER/n'i<c>&1\""), (2, "")]).start_ready();
    let odd = service.path("n'i<c>&1");
    let xml = |device: &str| service.command(&format!("xml --device {device}")).output().unwrap();
    let functions = |device: &str| {
        let text = String::from_utf8(xml(device).stdout).unwrap();
        assert!(text.contains("<access mode='shared'/>") && text.contains("<source type='memfd'/>"), "{text}");
        let domain = roxmltree::Document::parse(&text).unwrap();
        let arguments = domain.descendants().filter(|element| element.has_tag_name((QEMU, "arg")));
        let arguments: Vec<_> = arguments.map(|argument| argument.attribute("value").unwrap()).collect();
        let pairs = arguments.chunks(2).map(|pair| match pair {
            ["-device", function] => serde_json::from_str::<Value>(function).unwrap(),
            _ => panic!("{text}"),
        });
        pairs.collect::<Vec<_>>()
    };
    let [zero, one] = &functions("vm1")[..] else { panic!("not two functions") };
    assert_eq!((&zero["addr"], &zero["multifunction"]), (&"10.0".into(), &true.into()));
    assert_eq!(zero["socket"]["path"], odd.display().to_string());
    assert_eq!((&one["addr"], &one["multifunction"]), (&"10.1".into(), &Value::Null));
    assert_eq!(one["socket"]["path"], service.path("vm1").display().to_string());
    assert_eq!(functions("vm2").len(), 1);
    assert!(String::from_utf8(xml("vm2").stdout).unwrap().contains("MAC 52:54:00:00:00:02"));
    assert_eq!(xml("vm3").status.code(), Some(1));
}
