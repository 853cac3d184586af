//! Content and behaviour of the Debian package.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::daemon::{PROGRAM, TestDaemon};
use pvrdmad::config::{Config, ConfigSpec};

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging")
}

/// Names of the files in a folder.
fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn manual_pages_and_completions() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Command::new(PROGRAM).arg("package-files").arg(folder.path()).status().unwrap().success());
    let man = folder.path().join("man");
    let pages = names(&man);
    for command in ["add", "capture", "check", "events", "limits", "link", "remove", "show", "status", "top", "xml"] {
        assert!(pages.contains(&format!("pvrdmad-{command}.1")), "{command}: {pages:?}");
    }
    for hidden in ["worker", "reference", "package-files"] {
        assert!(!pages.contains(&format!("pvrdmad-{hidden}.1")), "{hidden}");
    }
    let page = fs::read_to_string(man.join("pvrdmad.1")).unwrap();
    for word in ["nic\\-socket", "SIGHUP", "pvrdmad\\-status(1)"] {
        assert!(page.contains(word), "no {word}: {page}");
    }
    assert!(page.contains(".SH EXAMPLES\n") && page.contains(".SH FILES\n") && page.contains(".SH \"SEE ALSO\"\n"));
    let file = fs::read_to_string(man.join("pvrdmad.toml.5")).unwrap();
    for word in ["nic\\-socket = PATH", "[[NETWORK]]", "max_qp", "RATE", ".SH EXAMPLES"] {
        assert!(file.contains(word), "no {word}: {file}");
    }
    assert!(!file.contains('`') && !file.contains("]("), "marks of Markdown: {file}");
    for page in names(&man) {
        let output =
            Command::new("man").args(["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"]).arg(man.join(&page)).output();
        // Without `man` there is nothing to check.
        let Ok(output) = output else { break };
        assert!(output.stderr.is_empty(), "{page}: {output:?}");
    }
    let completions = folder.path().join("completions");
    assert_eq!(names(&completions), ["_pvrdmad", "pvrdmad.bash", "pvrdmad.fish"].map(str::to_owned).into());
    let bash = completions.join("pvrdmad.bash");
    assert!(Command::new("bash").arg("-n").arg(&bash).status().unwrap().success());
    let offered = format!(
        "source '{}'; COMP_WORDS=(pvrdmad st); COMP_CWORD=1; _pvrdmad pvrdmad st pvrdmad; echo \"${{COMPREPLY[@]}}\"",
        bash.display()
    );
    let output = Command::new("bash").args(["-c", &offered]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "status", "{output:?}");
    for file in names(&completions) {
        let text = fs::read_to_string(completions.join(file)).unwrap();
        assert!(!text.contains("worker") && !text.contains("package-files"), "a hidden command is offered");
    }
}

/// Returns the completions that bash offers for a command line.
fn completed_by_bash(script: &Path, line: &str) -> Vec<String> {
    // Bash separates words at these characters for a completion function.
    let mut words: Vec<_> =
        line.split_inclusive([' ', '=', ':']).map(|word| format!("'{}'", word.trim_end())).collect();
    words.extend(line.ends_with(' ').then(|| "''".to_owned()));
    let program = Path::new(PROGRAM).parent().unwrap();
    let text = format!(
        "source '{}'; COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({}); COMP_CWORD={}; \
         _pvrdmad_known pvrdmad \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        script.display(),
        words.join(" "),
        words.len() - 1
    );
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let output = Command::new("bash").args(["-c", &text]).env("PATH", path).output().unwrap();
    assert!(output.stderr.is_empty(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// Completions know the keys of the configuration, and the devices and networks of a running daemon.
#[test]
fn completions_know_keys_and_names() {
    let mut daemon = TestDaemon::new().network("red", "");
    for (name, number) in [("db1", 1), ("db2", 2), ("web", 3)] {
        daemon = daemon.device(name, number, "network=red");
    }
    let daemon = daemon.start();
    assert!(Command::new(PROGRAM).arg("package-files").arg(daemon.folder()).status().unwrap().success());
    let script = daemon.path("completions/pvrdmad.bash");
    let offered = |line: &str| completed_by_bash(&script, line);
    let control = daemon.path("control").display().to_string();
    assert_eq!(offered(&format!("pvrdmad show qp --control {control} --device ")), ["db1", "db2", "web"]);
    assert_eq!(offered(&format!("pvrdmad remove --control {control} --device db")), ["db1", "db2"]);
    assert_eq!(offered(&format!("pvrdmad upgrade --control {control} --network ")), ["red"]);
    assert_eq!(offered("pvrdmad --device name=vm0,nic-s"), ["vm0,nic-socket="]);
    assert_eq!(offered(&format!("pvrdmad add --control {control} name=vm0,network=")), ["red"]);
    assert_eq!(offered("pvrdmad check --network name=a,offload="), ["on", "off"]);
    assert_eq!(offered("pvrdmad share --device web weig"), ["weight="]);
    // All else is completed as before.
    assert_eq!(offered("pvrdmad st"), ["status"]);
    // Without a daemon there are no names, and no files in their place.
    assert_eq!(offered("pvrdmad show --control /no/daemon --device "), [""]);
}

/// The commands of the unit parse, and its configuration loads.
#[test]
fn the_unit_starts_an_existing_program() {
    let unit = fs::read_to_string(packaging().join("pvrdmad.service")).unwrap();
    assert!(unit.contains("\nExecStart=/usr/bin/pvrdmad --config /etc/pvrdmad/pvrdmad.toml\n"));
    let config = Config::load(Some(&packaging().join("pvrdmad.toml")), ConfigSpec::default()).unwrap();
    let sockets = config.devices().flat_map(|(_, device)| [Some(&device.socket), device.nic_socket.as_ref()]);
    for socket in sockets.flatten() {
        assert!(socket.path().unwrap().starts_with("/run/pvrdmad"), "{socket} is not in the unit's folder");
    }
    let user = |text: &str| text.contains("pvrdmad");
    assert!(
        unit.contains("\nUser=pvrdmad\n")
            && user(&fs::read_to_string(packaging().join("sysusers.d/pvrdmad.conf")).unwrap())
    );
}

/// Returns the output of `systemd-analyze` with these arguments, or `None` if it is not installed.
fn systemd_analyze(arguments: &[&str]) -> Option<String> {
    let output = Command::new("systemd-analyze").arg("--no-pager").args(arguments).output().ok()?;
    Some(String::from_utf8(output.stdout).unwrap())
}

/// The exposure levels in docs/package.md are those of the unit and its drop-ins. Skipped where there is no systemd.
#[test]
fn the_unit_is_confined() {
    let unit = fs::read_to_string(packaging().join("pvrdmad.service")).unwrap();
    let page = fs::read_to_string(packaging().join("../../docs/package.md")).unwrap();
    for (row, file, most) in [
        ("none", None, 2.5),
        ("`uplink-vxlan.conf`", Some("uplink-vxlan.conf"), 3.0),
        ("`uplink-interface.conf`", Some("uplink-interface.conf"), 3.5),
        ("`mapped-doorbells.conf`", Some("mapped-doorbells.conf"), 3.5),
    ] {
        let line = page.lines().find(|line| line.starts_with(&format!("| {row} |"))).unwrap();
        let told: f64 = line.trim_end_matches(" |").rsplit("| ").next().unwrap().parse().unwrap();
        assert!(told <= most, "{line}");
        let folder = tempfile::tempdir().unwrap();
        let drop_in = file.map(|file| fs::read_to_string(packaging().join(file)).unwrap()).unwrap_or_default();
        // A drop-in is read after the unit, in sections of its own.
        let path = folder.path().join("pvrdmad.service");
        fs::write(&path, format!("{unit}\n{drop_in}")).unwrap();
        let Some(said) = systemd_analyze(&["security", "--offline=true", &path.to_string_lossy()]) else { return };
        let Some(last) = said.lines().rfind(|line| line.contains("Overall exposure level")) else {
            // This version of systemd cannot analyze files.
            return;
        };
        let level: f64 = last.split(": ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        println!("{row}: {level}");
        // Versions of systemd compute slightly different levels.
        assert!((level - told).abs() <= 0.3, "docs/package.md says {told}: {last}");
    }
}

/// The unit's system call filter allows all calls that a worker's own filter allows.
#[test]
fn the_unit_lets_workers_work() {
    let unit = fs::read_to_string(packaging().join("pvrdmad.service")).unwrap();
    let Some(sets) = systemd_analyze(&["syscall-filter"]) else { return };
    let mut allowed = BTreeSet::new();
    let filters = unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter="));
    for filter in filters {
        let (takes_away, words) = filter.strip_prefix('~').map_or((false, filter), |words| (true, words));
        for name in words.split(' ').flat_map(|word| members(&sets, word)) {
            if takes_away {
                allowed.remove(&name)
            } else {
                allowed.insert(name)
            };
        }
    }
    allowed.extend(members(&sets, "@default"));
    assert!(allowed.len() > 200, "{allowed:?}");
    let table = fs::read_to_string(packaging().join("../src/sandbox/calls.rs")).unwrap();
    let calls = table.split("SYS_").skip(1).map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next());
    let calls: BTreeSet<_> = calls.flatten().collect();
    assert!(calls.len() > 60, "{calls:?}");
    let refused: Vec<_> = calls.into_iter().filter(|call| !allowed.contains(*call)).collect();
    assert_eq!(refused, [""; 0]);
}

/// Returns a system call, or the members of a set including those of nested sets.
fn members(sets: &str, word: &str) -> Vec<String> {
    if !word.starts_with('@') {
        return vec![word.to_owned()];
    }
    let lines = sets.lines().skip_while(|line| *line != word).skip(1).take_while(|line| line.starts_with(' '));
    let names = lines.map(str::trim).filter(|name| !name.starts_with('#')).map(str::to_owned);
    names.flat_map(|name| members(sets, &name)).collect()
}

/// Creates a folder of programs that record their calls. Returns a `PATH` that finds them first.
fn recorded(folder: &Path, programs: &[(&str, &str)]) -> String {
    let calls = folder.join("calls");
    for (name, does) in programs {
        script(&folder.join(name), &format!("echo {name} \"$@\" >> '{}'\n{does}\n", calls.display()));
    }
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

/// Writes a program for bash.
fn script(path: &Path, does: &str) {
    let text = path.with_extension("text");
    fs::write(&text, format!("#!/bin/bash\n{does}")).unwrap();
    // Another process creates the program: children of other tests inherit the descriptors of this one, and a file
    // that is open for writing cannot be executed.
    assert!(Command::new("install").args([&text, path]).status().unwrap().success());
}

/// Runs `packaging/build` in a copy of its sources, with programs that only record their calls, and the program of this
/// test in place of those that it builds. Returns the folder with its results, and the calls.
fn build_with_recorded_programs(folder: &Path) -> (PathBuf, String) {
    let root = folder.join("source");
    let programs = folder.join("programs");
    fs::create_dir_all(&programs).unwrap();
    let source = packaging().join("../..");
    for file in ["pvrdmad/packaging", "lab/container", "docs", "Cargo.toml", "LICENSES", "README.md", "CHANGELOG.md"] {
        let to = root.join(file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        assert!(Command::new("cp").arg("-R").arg(source.join(file)).arg(&to).status().unwrap().success());
    }
    let [target, out] = ["target", "out"].map(|name| folder.join(name));
    let architecture = std::env::consts::ARCH;
    for built in ["release".to_owned(), format!("{architecture}-unknown-linux-musl/release")] {
        let built = target.join("packages").join(built);
        fs::create_dir_all(&built).unwrap();
        script(&built.join("pvrdmad"), &format!("exec '{PROGRAM}' \"$@\"\n"));
    }
    // A file of an earlier build.
    fs::create_dir_all(&out).unwrap();
    fs::write(out.join("pvrdmad_0_all.deb"), "").unwrap();
    let environment = "env | grep -E '^(SOURCE_DATE_EPOCH|CARGO_ENCODED_RUSTFLAGS|CFLAGS)=' >> \"$0.env\"
        [ \"$1\" != deb ] || touch \"$(echo \"$*\" | sed 's/.*--output //')/pvrdmad_1_all.deb\"
        [ \"$1\" != cyclonedx ] || echo \"path+file://$PWD/pvrdmad\" | tee {pvrdmad,lab}/\"${!#}.json\"";
    let path = recorded(
        &programs,
        &[("cargo", environment), ("objcopy", "[[ $1 != --only-keep-debug ]] || : > \"$3\""), ("strip", "")],
    );
    let mut build = Command::new(root.join("pvrdmad/packaging/build"));
    build.arg(&out).env("PATH", path).env("CARGO_TARGET_DIR", &target);
    for name in ["PROFILE", "PARTS", "SOURCE_DATE_EPOCH"] {
        build.env_remove(name);
    }
    let output = build.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let calls = ["calls", "cargo.env"].map(|name| fs::read_to_string(programs.join(name)).unwrap());
    (out, calls.concat())
}

/// The documented command builds the release profile, keeps its symbols apart, and makes the same archives in every
/// folder, at any time. `.ci/extended packages` compares two real builds.
#[test]
fn the_documented_command_makes_all_files_of_a_release() {
    let page = fs::read_to_string(packaging().join("../../docs/package.md")).unwrap();
    assert!(page.contains("\npvrdmad/packaging/build "), "the documented command differs");
    let folders = ["one", "another"].map(|name| tempfile::Builder::new().prefix(name).tempdir().unwrap());
    let [(out, calls), (again, _)] = folders.each_ref().map(|folder| build_with_recorded_programs(folder.path()));
    let call = |start: &str| calls.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{calls}"));
    assert!(call("cargo auditable build ").contains(" --locked --profile release -p pvrdmad"), "{calls}");
    let deb = call("cargo deb ");
    assert!(deb.contains(" --profile release ") && deb.contains(" --dbgsym "), "{calls}");
    // 22 Nov 2026 12:00, the date of the package's changelog.
    call("SOURCE_DATE_EPOCH=1795348800");
    let source = folders[0].path().join("source");
    for flag in ["CARGO_ENCODED_RUSTFLAGS", "CFLAGS"] {
        assert!(call(&format!("{flag}=")).contains(&format!("{}=/pvrdmad", source.display())), "{calls}");
    }
    let sums = fs::read_to_string(out.join("SHA256SUMS")).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let archive = format!("pvrdmad-{version}-{}.tar.gz", std::env::consts::ARCH);
    for name in [format!("pvrdmad-{version}.cdx.json"), format!("pvrdma-lab-{version}.cdx.json"), archive] {
        assert!(sums.contains(&format!("  {name}\n")), "no {name}: {sums}");
    }
    assert!(sums.contains("-symbols.tar.gz\n") && sums.contains("  pvrdmad_1_all.deb\n"), "{sums}");
    assert!(!sums.contains("pvrdmad_0_all.deb"), "a file of another build: {sums}");
    assert_eq!(sums, fs::read_to_string(again.join("SHA256SUMS")).unwrap());
    assert!(!source.join("pvrdmad/pvrdmad-part.cdx.json").exists(), "a file is left in the sources");
}

/// The archive of a release installs as the document says: the program runs, its configuration is valid, and the unit,
/// pages and completions are where the system looks for them. `/usr/local` is a folder here.
#[test]
fn the_archive_installs() {
    let folder = tempfile::tempdir().unwrap();
    let (out, _) = build_with_recorded_programs(folder.path());
    let page = fs::read_to_string(packaging().join("../../docs/package.md")).unwrap();
    let commands = page.lines().filter(|line| line.starts_with("sha256sum ") || line.starts_with("tar "));
    let commands: Vec<_> = commands.collect();
    assert_eq!(commands.len(), 2, "docs/package.md does not install the archive: {commands:?}");
    let prefix = folder.path().join("local");
    fs::create_dir(&prefix).unwrap();
    let here = |text: &str| text.replace("/usr/local", prefix.to_str().unwrap());
    let run = |command: &str| {
        let output = Command::new("bash").args(["-ec", &here(command)]).current_dir(&out).output().unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    fs::remove_file(out.join("pvrdmad_0_all.deb")).unwrap();
    commands.iter().for_each(|command| drop(run(command)));
    assert!(run("/usr/local/bin/pvrdmad --version").starts_with(concat!("pvrdmad ", env!("CARGO_PKG_VERSION"))));
    run("sh -n /usr/local/bin/pvrdma-guest-check");
    let config = here("/usr/local/share/doc/pvrdmad/pvrdmad.toml");
    Config::load(Some(Path::new(&config)), ConfigSpec::default()).unwrap();

    let read = |path: &str| fs::read_to_string(here(path)).unwrap();
    let files =
        ["lib/systemd/system/pvrdmad.service", "share/doc/pvrdmad/pvrdmad.toml", "share/doc/pvrdmad/alerts.yml"];
    let text: String = files.map(|file| read(&format!("/usr/local/{file}"))).concat();
    assert!(text.contains("\nExecStart=/usr/local/bin/pvrdmad --config /etc/pvrdmad/pvrdmad.toml\n"), "{text}");
    let named: BTreeSet<_> = text.split(|c: char| c.is_whitespace() || "#,:=".contains(c)).collect();
    let named: Vec<_> = named.into_iter().filter(|word| word.starts_with("/usr/")).collect();
    assert!(named.len() >= 5, "{named:?}");
    for path in named {
        assert!(path.starts_with("/usr/local/"), "{path} belongs to a package");
        run(&format!("ls {}", path.trim_end_matches('.')));
    }
    // Without `man` there is nothing to check.
    if Command::new("man").arg("--version").output().is_ok() {
        for page in ["1 pvrdmad", "1 pvrdmad-status", "1 pvrdma-guest-check", "5 pvrdmad.toml"] {
            run(&format!("man -M /usr/local/share/man -w {page}"));
        }
    }
    let bash = here("/usr/local/share/bash-completion/completions/pvrdmad");
    assert_eq!(completed_by_bash(Path::new(&bash), "pvrdmad st"), ["status"]);
    run("ls /usr/local/share/{fish/vendor_completions.d/pvrdmad.fish,zsh/site-functions/_pvrdmad}");
}

/// The address of the owner is in the workspace's manifest alone, and the page that quotes it has the same.
#[test]
fn the_address_of_the_owner_is_one_variable() {
    let root = packaging().join("../..");
    let manifest: toml::Table = fs::read_to_string(root.join("Cargo.toml")).unwrap().parse().unwrap();
    let package = &manifest["workspace"]["package"];
    let name = package["repository"].as_str().unwrap().rsplitn(3, '/').take(2).collect::<Vec<_>>();
    let quoted = format!("uses: {}/{}@v{}\n", name[1], name[0], env!("CARGO_PKG_VERSION"));
    let page = fs::read_to_string(root.join("docs/ci.md")).unwrap();
    assert!(page.contains(&quoted), "docs/ci.md does not say {quoted}");
    let address = package["authors"][0].as_str().unwrap().split_once('<').unwrap().1.trim_end_matches('>');
    for file in ["Cargo.toml", "packaging/changelog", "packaging/dkms/build", "packaging/dkms/control"] {
        let text = fs::read_to_string(packaging().join("..").join(file)).unwrap();
        assert!(!text.contains(address), "{file} has an address of its own");
    }
    let file = |name: &str| fs::read_to_string(packaging().join(name)).unwrap();
    assert!(
        file("changelog").contains("\n -- #MAINTAINER#  ")
            && file("dkms/control").contains("\nMaintainer: #MAINTAINER#\n")
    );
}

/// Purging the package keeps all files that the administrator wrote.
#[test]
fn a_purge_removes_the_files_of_the_package() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let programs = folder.path().join("programs");
    fs::create_dir_all(&programs).unwrap();
    let path = recorded(&programs, &[("getent", ""), ("userdel", "")]);
    let purge = |verb: &str| {
        let mut script = Command::new("sh");
        script.arg(packaging().join("debian/postrm")).arg(verb).env("DPKG_ROOT", &root).env("PATH", &path);
        let output = script.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let run = root.join("run/pvrdmad");
    fs::create_dir_all(&run).unwrap();
    let kept = ["etc/systemd/system/pvrdmad.service.d/mine.conf", "etc/pvrdmad/key.pem", "run/pvrdmad/mine"];
    for file in kept {
        let file = root.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, "precious").unwrap();
    }
    drop(UnixListener::bind(run.join("vm0.sock")).unwrap());
    purge("remove");
    assert!(run.join("vm0.sock").exists());
    purge("purge");
    for file in kept {
        assert!(root.join(file).exists(), "{file} is gone");
    }
    assert!(!run.join("vm0.sock").exists());
    fs::remove_file(run.join("mine")).unwrap();
    purge("purge");
    assert!(!run.exists());
    assert!(fs::read_to_string(programs.join("calls")).unwrap().contains("userdel pvrdmad"));
}

/// Each file of the package is in the source tree or created by `package-files`.
#[test]
fn files_of_the_package_exist() {
    let manifest = fs::read_to_string(packaging().join("../Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let deb = &manifest["package"]["metadata"]["deb"];
    let made = tempfile::tempdir().unwrap();
    assert!(Command::new(PROGRAM).arg("package-files").arg(made.path()).status().unwrap().success());
    let mut packed = BTreeSet::new();
    for asset in deb["assets"].as_array().unwrap() {
        let [source, to, _] = &asset.as_array().unwrap()[..] else { panic!("{asset}") };
        let (source, to) = (source.as_str().unwrap(), to.as_str().unwrap());
        let path = match source.strip_prefix("target/release/package/") {
            // `packaging/build` fills in the maintainer.
            Some("changelog.Debian.gz") => packaging().join("changelog"),
            Some(name) => made.path().join(name),
            None if source == "target/release/pvrdmad" => PathBuf::from(PROGRAM),
            None => packaging().join("..").join(source),
        };
        let folder = path.parent().unwrap();
        let unpacked = PathBuf::from(path.to_string_lossy().trim_end_matches(".gz"));
        let is_there = if source.contains('*') { !names(folder).is_empty() } else { unpacked.exists() };
        assert!(is_there, "{source} is nowhere");
        packed.insert(to);
    }
    for to in [
        "usr/bin/",
        "usr/bin/pvrdma-guest-check",
        "usr/share/man/man1/",
        "etc/pvrdmad/",
        "usr/lib/sysusers.d/pvrdmad.conf",
        "usr/lib/tmpfiles.d/pvrdmad.conf",
        "usr/share/bash-completion/completions/pvrdmad",
    ] {
        assert!(packed.contains(to), "{to}: {packed:?}");
    }
    let changelog = fs::read_to_string(packaging().join("changelog")).unwrap();
    assert!(changelog.starts_with(&format!("pvrdmad ({}-1) ", env!("CARGO_PKG_VERSION"))), "{changelog}");
    for script in names(&packaging().join("debian")) {
        let path = packaging().join("debian").join(script);
        assert!(Command::new("sh").arg("-n").arg(path).status().unwrap().success());
    }
}
