//! `demo`: shows the device's work for two guests in one table.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::{ContentArrangement, Table, presets};

use crate::cases::{Case, causes, perftest, run_single};
use crate::daemon::{cargo, set_program, workspace_manifest};
use crate::demo_cli::DemoOptions;
use crate::image::GuestImage;
use crate::pair::{Link, LinkKind, Pair, PairOptions};
use crate::process::BoundChild;
use crate::vm::has_kvm;

/// Time limit for building the daemon.
const BUILD: Duration = Duration::from_secs(3600);

/// Builds the daemon and, meanwhile, the missing parts of the image; then shows the demo.
pub(crate) fn run_from_sources(options: &DemoOptions) -> Result<()> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let target = own.parent().and_then(Path::parent).context("this program lies in no target directory")?;
    // The image step mostly downloads and unpacks, so it runs in parallel to the compiler. If it fails, as it does at
    // once without root, the compiler is killed.
    let mut compiler = build_daemon(target)?;
    let image = GuestImage::build()?;
    let status = compiler.wait(BUILD).context("the daemon was not built within an hour")?;
    ensure!(status.success(), "cannot build the daemon: cargo ended with {status}");
    set_program(target.join("demo/pvrdmad"));
    if options.prepare { Ok(()) } else { run(&image, options) }
}

/// Starts a build of the daemon in the profile `demo`, with the same features of common crates as this program.
fn build_daemon(target: &Path) -> Result<BoundChild> {
    let manifest = workspace_manifest().context("the workspace this program was built from is gone")?;
    BoundChild::spawn("the compiler", &cargo().to_string_lossy(), |command| {
        command.args(["build", "--profile", "demo", "--bin", "pvrdmad", "-p", "pvrdmad"]);
        command.args(["-p", "guest-tests", "--features", "demo", "--manifest-path"]).arg(manifest);
        command.arg("--target-dir").arg(target).stdin(Stdio::null());
    })
}

/// Boots two guests with both kinds of RDMA, runs the programs and prints the table.
fn run(image: &GuestImage, options: &DemoOptions) -> Result<()> {
    let processor = if has_kvm() { "KVM" } else { "emulated processors: slow, but a fair comparison" };
    println!("Two guests with the unmodified vmw_pvrdma driver; {} ({processor})", image.qemu_version()?);
    let mut pair = Pair::boot(image, &PairOptions::default())?;
    println!("\nIn guest a:\n{}", pair.a().run("rdma link")?);
    let links = [pair.link(LinkKind::Pvrdma)?, pair.link(LinkKind::Rxe)?];

    let mut programs = Table::new();
    programs.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    programs.set_header(["program between the guests", "our device"]);
    let mut failed = 0;
    for case in &crate::cases::all(LinkKind::Pvrdma) {
        let Some(title) = title(case) else { continue };
        println!("  {title}");
        let outcome = match run_single(case, &mut pair, LinkKind::Pvrdma) {
            Ok(note) => format!("works  {note}"),
            Err(error) => {
                failed += 1;
                println!("  {title} FAILS: {}", causes(&error));
                format!("FAILS: {}", error.to_string().lines().next().unwrap_or_default())
            }
        };
        programs.add_row([title.to_owned(), outcome]);
    }

    let speed = if options.no_speed { String::new() } else { format!("\n\n{}", speed(&pair, &links)?) };
    println!("\n{programs}{speed}");
    if failed > 0 {
        anyhow::bail!("{failed} programs failed");
    }
    Ok(())
}

/// Measures over both kinds of RDMA.
fn speed(pair: &Pair, links: &[Link; 2]) -> Result<Table> {
    let mut speed = Table::new();
    speed.load_style(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Dynamic);
    speed.set_header(["measured in this run", "our device", "rdma_rxe in the guests", "ratio"]);
    for measurement in MEASUREMENTS {
        println!("  {}", measurement.title);
        let values = [measurement.run(pair, &links[0])?, measurement.run(pair, &links[1])?];
        let ratio = if measurement.is_latency() { values[1] / values[0] } else { values[0] / values[1] };
        let shown = |value: f64| format!("{value:.2} {}", measurement.unit());
        speed.add_row([
            measurement.title.to_owned(),
            shown(values[0]),
            shown(values[1]),
            format!("{ratio:.1} times better"),
        ]);
    }
    Ok(speed)
}

/// A few cases of each group, by the name of the program. `test` runs all of them.
const SHOWN: [(&str, &str); 9] = [
    ("device/port-active", "rdma link"),
    ("pingpong/rc-check/a-to-b", "ibv_rc_pingpong -c"),
    ("pingpong/ud/a-to-b", "ibv_ud_pingpong"),
    ("pingpong/srq/a-to-b", "ibv_srq_pingpong"),
    ("cm/rping/a-to-b", "rping -V"),
    ("cm/ucmatose/a-to-b", "ucmatose"),
    ("cm/udaddy/a-to-b", "udaddy"),
    ("perftest/atomic-bw", "ib_atomic_bw"),
    ("nvme/fio-verify", "NVMe over RDMA, fio with verify"),
];

/// Returns the title of a case if it is shown.
fn title(case: &Case) -> Option<&'static str> {
    SHOWN.iter().find(|(name, _)| *name == case.name).map(|(_, title)| *title)
}

/// One figure of the comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measurement {
    /// Title for the reader.
    pub(crate) title: &'static str,
    /// Key in a results file.
    pub(crate) key: &'static str,
    program: &'static str,
    /// Options on the PVRDMA device.
    options: &'static str,
    /// Options on the slow device.
    slow_options: &'static str,
}

impl Measurement {
    /// Measures once.
    pub(crate) fn run(&self, pair: &Pair, link: &Link) -> Result<f64> {
        let options = match link.kind {
            LinkKind::Pvrdma => self.options,
            LinkKind::Rxe => self.slow_options,
        };
        let rows = perftest::run(&pair.endpoints(link), 1, self.program, options)?;
        let value = if self.is_latency() { perftest::Row::typical_microseconds } else { perftest::Row::gigabits };
        perftest::single(&rows, value).with_context(|| format!("{} on {}", self.title, link.device))
    }

    /// Returns `true` if less is better.
    pub(crate) fn is_latency(&self) -> bool {
        self.program.ends_with("_lat")
    }

    /// Returns the unit of the value.
    pub(crate) fn unit(&self) -> &'static str {
        if self.is_latency() { "us" } else { "Gb/s" }
    }
}

/// Writes of many sizes, likewise.
pub(crate) const SIZES: [Measurement; 5] = [
    Measurement {
        title: "RDMA write, 64 bytes",
        key: "size-64",
        program: "ib_write_bw",
        options: "-s 64 -n 20000",
        slow_options: "-s 64 -n 2000",
    },
    Measurement {
        title: "RDMA write, 1 KiB",
        key: "size-1024",
        program: "ib_write_bw",
        options: "-s 1024 -n 20000",
        slow_options: "-s 1024 -n 2000",
    },
    Measurement {
        title: "RDMA write, 16 KiB",
        key: "size-16384",
        program: "ib_write_bw",
        options: "-s 16384 -n 5000",
        slow_options: "-s 16384 -n 300",
    },
    Measurement {
        title: "RDMA write, 256 KiB",
        key: "size-262144",
        program: "ib_write_bw",
        options: "-s 262144 -n 1000",
        slow_options: "-s 262144 -n 60",
    },
    Measurement {
        title: "RDMA write, 4 MiB",
        key: "size-4194304",
        program: "ib_write_bw",
        options: "-s 4194304 -n 200",
        slow_options: "-s 4194304 -n 10",
    },
];

/// Figures that are compared. The slow side moves fewer messages, so that each run takes only seconds.
pub(crate) const MEASUREMENTS: [Measurement; 5] = [
    Measurement {
        title: "RDMA write, 1 MiB",
        key: "write_bw_1m",
        program: "ib_write_bw",
        options: "-s 1048576 -n 1000",
        slow_options: "-s 1048576 -n 20",
    },
    Measurement {
        title: "RDMA read, 1 MiB",
        key: "read_bw_1m",
        program: "ib_read_bw",
        options: "-s 1048576 -n 1000",
        slow_options: "-s 1048576 -n 20",
    },
    Measurement {
        title: "send, 64 KiB",
        key: "send_bw_64k",
        program: "ib_send_bw",
        options: "-s 65536 -n 5000",
        slow_options: "-s 65536 -n 100",
    },
    Measurement {
        title: "latency of a write, 8 bytes",
        key: "write_lat_8",
        program: "ib_write_lat",
        options: "-s 8 -n 2000",
        slow_options: "-s 8 -n 500",
    },
    Measurement {
        title: "latency of a send, 8 bytes",
        key: "send_lat_8",
        program: "ib_send_lat",
        options: "-s 8 -n 2000",
        slow_options: "-s 8 -n 500",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    /// `guest-tests/recording/record` recreates the recording.
    #[test]
    fn the_recording_shows_the_demo() {
        let root = workspace_manifest().unwrap();
        let picture = std::fs::read_to_string(root.with_file_name("docs").join("demo.svg")).unwrap();
        let picture = roxmltree::Document::parse(&picture).unwrap();
        let words: Vec<_> =
            picture.descendants().filter(|node| node.is_text()).filter_map(|node| node.text()).collect();
        let text = words.join(" ");
        for (_, title) in SHOWN {
            assert!(text.contains(title), "not recorded: {title}");
        }
        assert!(!text.contains("FAILS"));
    }
}
