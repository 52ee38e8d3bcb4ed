//! kvpool.h in Rust: the table of functions, and how to get it. The header says what each of them does.
#![allow(dead_code)]

use std::ffi::{c_char, c_int, c_void};

pub const MAGIC: u64 = 0x6b76706f6f6c4331;
pub const ABI_VERSION: u32 = 3;
pub const SLOT_MAPPING: i32 = 2;

#[repr(C)]
pub struct Array {
    pub data: *const c_void,
    pub length: i64,
    pub width: i64,
    pub itemsize: i32,
}

#[repr(C)]
pub struct Keep {
    pub ttl: i64,
    pub tokens: i64,
    pub priority: i32,
}

pub type Pool = *mut c_void;
pub type Plan = *mut c_void;

#[repr(C)]
pub struct Api {
    pub magic: u64,
    pub abi_version: u32,
    pub struct_size: u32,
    pub pool_from: unsafe extern "C" fn(*mut c_void, *mut Pool) -> c_int,
    pub plan_from: unsafe extern "C" fn(*mut c_void, *mut Plan) -> c_int,
    pub error_message: unsafe extern "C" fn() -> *const c_char,
    pub raise_error: unsafe extern "C" fn() -> *mut c_void,
    pub open: unsafe extern "C" fn(Pool, i64, *mut i64) -> c_int,
    pub open_prompt:
        unsafe extern "C" fn(Pool, *const i32, i64, *const c_char, i64, *const Keep, *mut i64, *mut i64) -> c_int,
    pub fork: unsafe extern "C" fn(Pool, i64, i64, *mut i64) -> c_int,
    pub truncate: unsafe extern "C" fn(Pool, *const i64, *const i64, i64) -> c_int,
    pub close: unsafe extern "C" fn(Pool, *const i64, i64) -> c_int,
    pub commit:
        unsafe extern "C" fn(Pool, *const i64, *const i64, i64, *const i32, i64, *const Keep) -> c_int,
    pub step: unsafe extern "C" fn(Pool, Plan, *const i64, *const i64, i64, i32) -> c_int,
    pub step_padded:
        unsafe extern "C" fn(Pool, Plan, *const i64, *const i64, i64, i32, i64, i64) -> c_int,
    pub reserve: unsafe extern "C" fn(Pool, Plan, *const i64, *const i64, i64) -> c_int,
    pub done: unsafe extern "C" fn(Pool, Plan) -> c_int,
    pub rollback: unsafe extern "C" fn(Pool, Plan) -> c_int,
    pub array: unsafe extern "C" fn(Plan, i32, *mut Array) -> c_int,
    pub table: unsafe extern "C" fn(Pool, i64, *mut *const i32, *mut i64) -> c_int,
    pub num_tokens: unsafe extern "C" fn(Pool, i64, *mut i64) -> c_int,
    pub num_free: unsafe extern "C" fn(Pool, *mut i64) -> c_int,
    pub stats: unsafe extern "C" fn(Pool, *mut c_void, i64) -> c_int,
    pub digest: unsafe extern "C" fn(Pool, *mut u64) -> c_int,
    pub group_array: unsafe extern "C" fn(Plan, i32, i32, *mut Array) -> c_int,
    pub group_table: unsafe extern "C" fn(Pool, i64, i32, *mut *const i32, *mut i64) -> c_int,
    pub tick: unsafe extern "C" fn(Pool, i64) -> c_int,
    pub limit_kept: unsafe extern "C" fn(Pool, *const c_char, i64, i64) -> c_int,
    pub resize: unsafe extern "C" fn(Pool, i64, i32, *mut i32, i64, *mut i64) -> c_int,
}

extern "C" {
    fn PyCapsule_Import(name: *const c_char, no_block: c_int) -> *mut c_void;
    fn PyErr_SetString(kind: *mut c_void, message: *const c_char);
    static PyExc_ImportError: *mut c_void;
}

/// The table, or None with a Python exception set.
///
/// # Safety
/// The caller holds the GIL.
pub unsafe fn import() -> Option<&'static Api> {
    let api = PyCapsule_Import(c"kvpool._C_API".as_ptr(), 0) as *const Api;
    if api.is_null() {
        return None;
    }
    let fits = (*api).magic == MAGIC
        && (*api).abi_version == ABI_VERSION
        && (*api).struct_size as usize >= std::mem::size_of::<Api>();
    if !fits {
        let message = c"kvpool's table of functions is not the one that this library was compiled for";
        PyErr_SetString(PyExc_ImportError, message.as_ptr());
        return None;
    }
    Some(&*api)
}
