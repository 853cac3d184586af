//! The steps of a guest image, in their order.

use anyhow::{Context, Result};

use super::guest_image::{GuestImage, cache_directory};
use super::steps::Steps;
use super::{initramfs, kernel, modules, programs, root_disk, roots};

impl GuestImage {
    /// Builds the missing parts of the image and returns it.
    pub fn build() -> Result<Self> {
        let dir = cache_directory()?;
        std::fs::create_dir_all(&dir)
            .with_context(|| format!("cannot create the image's directory {}", dir.display()))?;
        let image = Self { dir };
        if image.is_packed() {
            return Ok(image);
        }
        let mut steps = Steps::open(&image.dir)?;
        steps.run("tools", &roots::TOOLS.join(" "), roots::install_tools)?;
        steps.run("base system", &roots::base_key()?, |log| roots::base(&image, log))?;
        steps.run("builder system", &roots::BUILDER_PACKAGES.join(" "), |log| roots::builder(&image, log))?;
        steps.run("kernel", kernel::KEY, |log| kernel::fetch(&image, log))?;
        steps.run("vmw_pvrdma driver", kernel::DRIVER_KEY, |log| kernel::build_driver(&image, log))?;
        steps.run("guest system", &roots::GUEST_PACKAGES.join(" "), |log| roots::guest(&image, log))?;
        steps.run("guest modules", &modules::key(), |log| modules::install(&image, log))?;
        steps.run("guest programs", programs::KEY, |log| programs::build(&image, log))?;
        steps.run("guest image", root_disk::KEY, |log| root_disk::build(&image, log))?;
        steps.run("initramfs", initramfs::KEY, |log| initramfs::build(&image, log))?;
        steps.finish();
        Ok(image)
    }
}
