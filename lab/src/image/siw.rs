//! `siw`, the kernel's iWARP in software, which Debian's kernel configuration leaves out. It is built when a test needs
//! it.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::guest_image::GuestImage;
use super::steps::Steps;
use crate::vm::Vm;

/// Modules that are loaded into a guest, in this order. The guests' system has the other ones that they need.
const MODULES: [&str; 2] = ["libcrc32c", "siw"];

/// The kernel modules.
#[derive(Debug)]
pub struct SiwModule {
    folder: PathBuf,
}

impl SiwModule {
    /// Builds the missing parts.
    pub fn build(image: &GuestImage) -> Result<Self> {
        let built = Self { folder: image.directory().join("siw") };
        let mut steps = Steps::open(image.directory())?;
        steps.run("siw module", &format!("{} {SCRIPT}", image.kernel_release()?), |log| {
            let root = image.builder_root();
            log.shell_in(&root, &format!("release={}\n{SCRIPT}", image.kernel_release()?))?;
            std::fs::create_dir_all(&built.folder)
                .with_context(|| format!("cannot create {}", built.folder.display()))?;
            for module in MODULES {
                let file = format!("{module}.ko");
                let from = root.join("bed/siw").join(&file);
                std::fs::copy(&from, built.folder.join(file))
                    .with_context(|| format!("cannot copy {}", from.display()))?;
            }
            Ok(())
        })?;
        steps.finish();
        Ok(built)
    }

    /// Loads `siw` into a guest, with the connection manager, and adds the adapter `siw0` to the interface.
    pub fn start(&self, vm: &Vm, interface: &str) -> Result<()> {
        vm.run("modprobe -a ib_uverbs rdma_ucm")?;
        for module in MODULES {
            let path = self.folder.join(format!("{module}.ko"));
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            vm.write_file(&format!("/run/{module}.ko"), 0o600, &bytes)?;
            vm.run(&format!("grep -q '^{module} ' /proc/modules || insmod /run/{module}.ko"))?;
        }
        vm.run(&format!("rdma link add siw0 type siw netdev {interface}"))?;
        Ok(())
    }
}

const SCRIPT: &str = "\
rm -rf /bed/siw && mkdir -p /bed/siw && cd /bed/siw
apt-get download -q linux-source-6.12
dpkg-deb --fsys-tarfile linux-source-6.12_*.deb | tar -x
rm ./*.deb
xz -T0 -dc usr/src/linux-source-6.12.tar.xz |
    tar -x --strip-components=1 --wildcards '*/drivers/infiniband/sw/siw'
rm -r usr
make -j \"$(nproc)\" -C /usr/src/linux-headers-$release M=$PWD/drivers/infiniband/sw/siw \\
    CONFIG_RDMA_SIW=m modules
strip -g -o siw.ko drivers/infiniband/sw/siw/siw.ko
xz -dc /usr/lib/modules/$release/kernel/lib/libcrc32c.ko.xz > libcrc32c.ko
";
