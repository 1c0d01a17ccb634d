# SPDX-License-Identifier: GPL-2.0-only
# What each mapping runs through comes first, next to each other.
obj-$(CONFIG_IOMMU_DMA_BOUNCE) += dma-bounce-map.o dma-bounce-copy.o dma-bounce-slots.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE) += dma-bounce.o dma-bounce-pool.o dma-bounce-share.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE) += dma-bounce-pages.o dma-bounce-single.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE) += dma-bounce-calibrate.o dma-bounce-debugfs.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE_REQUEST) += dma-bounce-request.o
obj-$(CONFIG_VIRTIO_IOMMU_WINDOW) += virtio-iommu-window.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE_TEST) += dma-bounce-test.o dma-bounce-test-edu.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE_TEST) += dma-bounce-test-list.o dma-bounce-test-attack.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE_KUNIT_TEST) += dma-bounce-kunit.o dma-bounce-kunit-pool.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE_KUNIT_TEST) += dma-bounce-kunit-list.o dma-bounce-kunit-iommu.o
obj-$(CONFIG_IOMMU_DMA_BOUNCE_KUNIT_TEST) += dma-bounce-kunit-share.o
ifdef CONFIG_VIRTIO_IOMMU_WINDOW
obj-$(CONFIG_IOMMU_DMA_BOUNCE_KUNIT_TEST) += virtio-iommu-window-kunit.o
endif
ifdef CONFIG_IOMMU_DMA_BOUNCE_REQUEST
obj-$(CONFIG_IOMMU_DMA_BOUNCE_KUNIT_TEST) += dma-bounce-kunit-request.o
endif
