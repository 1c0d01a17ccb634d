/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Loans: memory that a pool has lent to applications. See the comment at the top of
 * dma-bounce-loan.c.
 */
#ifndef _DMA_BOUNCE_LOAN_H
#define _DMA_BOUNCE_LOAN_H

#include <linux/atomic.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/types.h>

#include "dma-bounce-types.h"

struct dma_bounce_lent;
struct file;
struct page;
struct ucounts;

/**
 * struct dma_bounce_loan - memory that one call of mmap() lent to an application
 * @list:	entry in the pool's list
 * @all:	entry in the list of all loans that have memory
 * @source:	memory budget that the loan draws on
 * @bytes:	bytes of the loan's chunks
 * @file:	file that is mapped. The reference keeps its file system mounted.
 * @start:	offset of the loan in the file
 * @ucounts:	the user whose locked memory includes @bytes
 * @per_chunk:	number of pages of each chunk that are lent
 * @refs:	one reference for each mapping, and one while the loan is in the pool's list
 * @mappings:	number of mappings. A mapping may be split.
 * @lock:	protects the members after it against page faults
 * @stopped:	the memory was taken back, so page faults fail
 * @nchunks:	number of chunks
 * @chunks:	the chunks
 */
struct dma_bounce_loan {
	struct list_head	list;
	struct list_head	all;
	const void		*source;
	u64			bytes;
	struct file		*file;
	loff_t			start;
	struct ucounts		*ucounts;
	unsigned long		per_chunk;
	refcount_t		refs;
	atomic_t		mappings;
	struct mutex		lock;	/* protects the members below */
	bool			stopped;
	unsigned int		nchunks;
	struct dma_bounce_lent	*chunks[] __counted_by(nchunks);
};

extern const struct dma_bounce_loan_ops dma_bounce_loan_ops;

unsigned long dma_bounce_loan_per_chunk(struct dma_bounce_pool *pool);
struct dma_bounce_loan *dma_bounce_loan_make(struct dma_bounce_pool *pool, struct file *file,
					     unsigned int nchunks);
struct page *dma_bounce_loan_page(struct dma_bounce_loan *loan, unsigned int n, unsigned long i);
void dma_bounce_loan_put(struct dma_bounce_loan *loan);

#endif /* _DMA_BOUNCE_LOAN_H */
