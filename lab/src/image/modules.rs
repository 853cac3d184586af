//! The kernel modules of the guests. They are few and uncompressed, because an emulated processor takes long to unpack
//! them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::guest_image::GuestImage;
use super::log_command::StepLog;
use super::roots::remove_tree;

/// Modules that the first stage loads, in any order, with their dependencies.
pub(crate) const BOOT_MODULES: [&str; 6] =
    ["virtio_pci", "virtio_blk", "virtio_console", "crc32c_generic", "ext4", "overlay"];

const GUEST_MODULES: [&str; 36] = [
    "vmxnet3",
    "virtio_net",
    "virtio_rng",
    "vmw_pvrdma",
    "ib_core",
    "ib_uverbs",
    "ib_umad",
    "rdma_cm",
    "rdma_ucm",
    "rdma_rxe",
    // rxe requests it by the name of the algorithm, so modules.dep does not list it.
    "crc32_generic",
    "nvmet",
    "nvmet_rdma",
    "nvme_rdma",
    "nvme_fabrics",
    "null_blk",
    "brd",
    "loop",
    "configfs",
    "af_packet",
    "veth",
    "8021q",
    "sch_netem",
    // Links with ECN marking.
    "bridge",
    "sch_tbf",
    "sch_red",
    "sch_prio",
    "cls_u32",
    // Tunnels that guests create over their vNICs.
    "vxlan",
    "geneve",
    "wireguard",
    // Shared folders of the host.
    "9p",
    "9pnet_virtio",
    // A guest that acts as a host, on emulated SVM.
    "kvm_amd",
    // In such a guest a daemon exports doorbell pages through FUSE.
    "fuse",
    // Power-off without ACPI.
    "pvpanic_pci",
];

/// Dependencies of the module selection.
pub(crate) fn key() -> String {
    format!("{} {}", BOOT_MODULES.join(" "), GUEST_MODULES.join(" "))
}

/// Copies the modules into the guest's system and indexes them there.
pub(crate) fn install(image: &GuestImage, log: &StepLog) -> Result<()> {
    let release = image.kernel_release()?;
    let builder = image.builder_root();
    let source = image.kernel_tree().join("usr/lib/modules").join(&release);
    let source = if source.exists() { source } else { image.kernel_tree().join("lib/modules").join(&release) };
    // The driver is added to the tree before depmod runs, so that its dependencies are known.
    let extra = source.join("extra");
    std::fs::create_dir_all(&extra).with_context(|| format!("cannot create {}", extra.display()))?;
    std::fs::copy(image.driver(), extra.join("vmw_pvrdma.ko")).context("cannot copy the driver")?;
    let all = builder.join("usr/lib/modules").join(&release);
    remove_tree(&all)?;
    log.run(Command::new("cp").arg("-a").arg(&source).arg(&all))?;
    log.shell_in(&builder, &format!("depmod {release}"))?;

    remove_tree(&image.guest_root().join("usr/lib/modules").join(&release))?;
    copy(image, log, &image.guest_root(), BOOT_MODULES.into_iter().chain(GUEST_MODULES))
}

/// Adds modules and their dependencies to those of a guest's system, and indexes them there.
pub(super) fn copy(
    image: &GuestImage,
    log: &StepLog,
    root: &Path,
    modules: impl IntoIterator<Item = &'static str>,
) -> Result<()> {
    let release = image.kernel_release()?;
    let all = image.builder_root().join("usr/lib/modules").join(&release);
    let index = ModuleIndex::read(&all.join("modules.dep"))?;
    let builtin = std::fs::read_to_string(all.join("modules.builtin")).unwrap_or_default();
    let mut wanted = BTreeSet::new();
    for module in modules {
        match index.closure(module) {
            Some(paths) => wanted.extend(paths),
            None if builtin.contains(&format!("/{module}.ko"))
                || builtin.contains(&format!("/{}.ko", module.replace('_', "-"))) => {}
            None => bail!("the kernel {release} has no module {module}"),
        }
    }

    let target = root.join("usr/lib/modules").join(&release);
    for path in &wanted {
        let to = target.join(path.with_extension("").with_extension("ko"));
        let parent = to.parent().context("a module outside every directory")?;
        std::fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let from = all.join(path);
        if path.extension().is_some_and(|extension| extension == "xz") {
            log.shell(&format!("xz -dc '{}' > '{}'", from.display(), to.display()))?;
        } else {
            std::fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        }
    }
    for list in ["modules.builtin", "modules.builtin.modinfo", "modules.order"] {
        std::fs::copy(all.join(list), target.join(list)).with_context(|| format!("cannot copy {list}"))?;
    }
    log.shell_in(root, &format!("depmod {release}"))
}

/// Returns the files that the first stage loads, in load order, relative to the guest's module directory.
pub(crate) fn boot_order(module_directory: &Path) -> Result<Vec<PathBuf>> {
    let index = ModuleIndex::read(&module_directory.join("modules.dep"))?;
    let mut order = Vec::new();
    for module in BOOT_MODULES {
        for path in index.closure(module).unwrap_or_default() {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

/// `modules.dep`: for each module the files it needs.
#[derive(Debug)]
struct ModuleIndex {
    entries: BTreeMap<String, Vec<PathBuf>>,
}

impl ModuleIndex {
    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let mut entries = BTreeMap::new();
        for line in text.lines() {
            if let Some((path, needs)) = line.split_once(':') {
                // depmod lists the needed modules so that the last is loaded first.
                let mut files: Vec<PathBuf> = needs.split_whitespace().rev().map(PathBuf::from).collect();
                files.push(PathBuf::from(path));
                entries.insert(module_name(path), files);
            }
        }
        Self { entries }
    }

    /// Returns the files of a module and of all its dependencies, in load order.
    fn closure(&self, module: &str) -> Option<Vec<PathBuf>> {
        self.entries.get(&module.replace('-', "_")).cloned()
    }
}

fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split('.').next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closure_is_in_load_order() {
        let index =
            ModuleIndex::parse("kernel/a/top.ko.xz: kernel/b/mid-dle.ko.xz kernel/b/low.ko.xz\nkernel/b/low.ko.xz:\n");
        let paths = index.closure("top").unwrap();
        assert_eq!(paths, ["kernel/b/low.ko.xz", "kernel/b/mid-dle.ko.xz", "kernel/a/top.ko.xz"].map(PathBuf::from));
        assert!(index.closure("none").is_none());
    }
}
