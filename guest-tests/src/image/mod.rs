//! The guest image: QEMU, a kernel, the unchanged `vmw_pvrdma` driver and a root file system, all built from Debian
//! packages at run time into a cache directory. Nothing of it is part of this repository.

mod applications_disk;
mod apt;
mod build;
mod disk;
mod guest_image;
mod guest_system;
mod host_root;
mod initramfs;
mod kernel;
mod log_command;
mod modules;
mod programs;
mod root_disk;
mod roots;
mod steps;
mod systemd_disk;

pub(crate) use applications_disk::ApplicationsDisk;
pub(crate) use disk::Disk;
pub(crate) use guest_image::GuestImage;
pub(crate) use guest_system::{GuestSystem, SYSTEMS};
pub(crate) use host_root::HostRoot;
pub(crate) use initramfs::append_program;
pub(crate) use roots::{BACKPORTS, executable};
pub(crate) use systemd_disk::SystemdDisk;
