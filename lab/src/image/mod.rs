//! The guest image: QEMU, a kernel, the unchanged `vmw_pvrdma` driver and a root file system. All of it is built from
//! Debian packages at run time, in a cache directory. None of it is part of this repository.

mod applications_disk;
mod apt;
mod build;
mod contents;
mod deb822;
mod disk;
mod guest_image;
mod guest_system;
mod host_root;
mod initramfs;
mod kernel;
mod log_command;
mod modules;
mod packages_disk;
mod programs;
mod root_disk;
mod roots;
mod siw;
mod steps;
mod systemd_disk;

pub use applications_disk::ApplicationsDisk;
pub use disk::Disk;
pub use guest_image::GuestImage;
pub use guest_system::{GuestSystem, SYSTEMS};
pub use host_root::HostRoot;
pub use initramfs::append_program;
pub use packages_disk::{Package, packages_disk};
pub use roots::{BACKPORTS, executable};
pub use siw::SiwModule;
pub use systemd_disk::SystemdDisk;
