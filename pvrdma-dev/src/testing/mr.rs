//! Memory regions.

use super::command::{CommandError, Request, command_id};
use super::{Buffer, Directory, Driver, Pd, Placement};

/// Access rights (appendix A of the specification).
#[expect(missing_docs, reason = "the names of the specification")]
pub mod access {
    pub const LOCAL_WRITE: u32 = 1;
    pub const REMOTE_WRITE: u32 = 2;
    pub const REMOTE_READ: u32 = 4;
    pub const REMOTE_ATOMIC: u32 = 8;
    pub const ALL: u32 = 15;
}

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    driver: Driver,
    /// Its handle.
    pub handle: u32,
    /// Key for local use.
    pub lkey: u32,
    /// Key for peers.
    pub rkey: u32,
    directory: Option<Directory>,
}

impl Mr {
    /// DESTROY_MR; its directory is freed immediately, the buffer belongs to the caller.
    ///
    /// # Errors
    /// The command failed; the memory is freed nevertheless, as the driver does.
    pub fn destroy(self) -> Result<(), CommandError> {
        let result = self.driver.execute(&Request::new(command_id::DESTROY_MR).u32(16, self.handle));
        if let Some(directory) = &self.directory {
            self.driver.0.memory.free_directory(directory);
        }
        result.map(drop)
    }

    /// Returns its page directory.
    pub const fn directory(&self) -> Option<&Directory> {
        self.directory.as_ref()
    }
}

/// A CREATE_MR that was not issued yet. Its page directory is written, so that the time of the command is the device's.
#[derive(Debug)]
pub struct MrRequest {
    driver: Driver,
    request: Request,
    directory: Directory,
}

impl MrRequest {
    /// Issues the command.
    ///
    /// # Errors
    /// The command failed.
    pub fn issue(self) -> Result<Mr, CommandError> {
        self.driver.create_mr(&self.request, Some(self.directory))
    }
}

/// Region for fast registrations, with its page directory.
#[derive(Debug)]
pub struct FastMr {
    /// The region.
    pub mr: Mr,
    /// Maximum number of pages.
    pub max_pages: usize,
}

impl FastMr {
    /// Writes the page list, as posting a registration does. Returns the directory's address.
    pub fn set_pages(&self, pages: &[u64]) -> u64 {
        let directory = self.mr.directory.as_ref().unwrap();
        assert!(pages.len() <= self.max_pages);
        let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
        self.mr.driver.0.memory.write(directory.tables[0], &bytes);
        directory.addr
    }
}

impl Driver {
    fn create_mr(&self, request: &Request, directory: Option<Directory>) -> Result<Mr, CommandError> {
        match self.execute(request) {
            Ok(response) => Ok(Mr {
                driver: self.clone(),
                handle: response.u32(16),
                lkey: response.u32(20),
                rkey: response.u32(24),
                directory,
            }),
            Err(error) => {
                if let Some(directory) = &directory {
                    self.0.memory.free_directory(directory);
                }
                Err(error)
            }
        }
    }

    /// CREATE_MR for memory of a process.
    ///
    /// # Errors
    /// The command failed.
    pub fn reg_mr(&self, pd: &Pd, buffer: &Buffer, access: u32) -> Result<Mr, CommandError> {
        self.reg_mr_pages(pd, buffer.va(), buffer.len() as u64, buffer.pages(), access)
    }

    /// CREATE_MR for any range and pages.
    ///
    /// # Errors
    /// The command failed.
    pub fn reg_mr_pages(
        &self,
        pd: &Pd,
        start: u64,
        length: u64,
        pages: &[u64],
        access: u32,
    ) -> Result<Mr, CommandError> {
        self.mr_request(pd, start, length, pages, access).issue()
    }

    /// Returns CREATE_MR for any range and pages, with its page directory written.
    pub fn mr_request(&self, pd: &Pd, start: u64, length: u64, pages: &[u64], access: u32) -> MrRequest {
        let directory = self.0.memory.directory(pages);
        let request = Request::new(command_id::CREATE_MR).u64(16, start).u64(24, length).u64(32, directory.addr);
        let request = request.u32(40, pd.handle).u32(44, access).u32(52, pages.len() as u32);
        MrRequest { driver: self.clone(), request, directory }
    }

    /// CREATE_MR for bus addresses.
    ///
    /// # Errors
    /// The command failed.
    pub fn dma_mr(&self, pd: &Pd) -> Result<Mr, CommandError> {
        let request = Request::new(command_id::CREATE_MR).u32(40, pd.handle).u32(44, access::LOCAL_WRITE).u32(48, 1);
        self.create_mr(&request, None)
    }

    /// CREATE_MR for fast registration.
    ///
    /// # Errors
    /// The command failed.
    pub fn fast_mr(&self, pd: &Pd, max_pages: usize) -> Result<FastMr, CommandError> {
        let directory = self.0.memory.directory(&vec![0; max_pages]);
        let request = Request::new(command_id::CREATE_MR).u32(40, pd.handle).u32(48, 2).u32(52, max_pages as u32);
        Ok(FastMr { mr: self.create_mr(&request, Some(directory))?, max_pages })
    }

    /// Allocates a buffer and registers all of it.
    ///
    /// # Errors
    /// The command failed.
    pub fn registered_buffer(&self, pd: &Pd, len: usize, access: u32) -> Result<(Buffer, Mr), CommandError> {
        let buffer = self.buffer(len, 0, Placement::Scattered);
        let mr = self.reg_mr(pd, &buffer, access)?;
        Ok((buffer, mr))
    }
}
